"""One request's place in its grammar: which tokens may come next, and what the drawn one leads to."""

from typing import TYPE_CHECKING

from ...prompt.errors import BadRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    """Follows one generation. Belongs to its sequence, and survives its preemption with it; for one thread at a time.

    A grammar may become too complex only where a generation has led it. The matcher then fails, and `accept` says so:
    nothing else that runs in the step is harmed.
    """

    def __init__(self, core: "LLMatcher", *, param: str) -> None:
        self.core = core
        self._param = param

    @property
    def failed(self) -> bool:
        """Whether there is no mask to be had any more."""
        return self.core.is_error()

    def accept(self, token: int) -> bool:
        """Move on by a token that the mask allowed; return whether nothing may follow it.

        Raises BadRequest when the grammar cannot be followed further.
        """
        if self.failed or not self.core.consume_token(token):
            raise BadRequest(f"{self._param}: the grammar became too complex for this output", param=self._param)
        ended = self.core.is_stopped()
        if ended and not self.core.is_accepting():
            raise BadRequest(f"{self._param}: the model has no tokens to write what must follow", param=self._param)
        return ended
