"""The policy file of chaos.py and of tests/gateway/test_chaos.py: one backend over an upstream that misbehaves."""

import os
from dataclasses import dataclass
from pathlib import Path

_TEXT = """
version: 1
default_policy: off
server: {{request_timeout: 20, drain_timeout: 30, limits: {{tokens_per_minute: 1000000000, concurrent: 100000}}}}
backends:
  far:
    kind: openai
    base_url: http://127.0.0.1:{port}/v1
    models: [far]
    timeouts: {{read: {read}, pool: 60}}
    max_connections: {pool}
    breaker: {{failures: 0}}
{more}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangingFile:
    """`upstream` is the upstream's port, `pool` how many connections it gets; `more` are lines of other backends."""

    path: Path
    upstream: int
    pool: int
    more: str = ""

    def write(self, *, read: float) -> None:
        """Put another version in its place, as a whole. `read`: the backend's timeout, in seconds."""
        aside = self.path.with_suffix(".tmp")
        aside.write_text(_TEXT.format(port=self.upstream, read=read, pool=self.pool, more=self.more))
        os.replace(aside, self.path)
