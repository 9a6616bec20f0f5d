"""Starts a real gateway process for the tests: `launcher.py POLICY_FILE PORT [LOG_LEVEL]`.

A backend whose name begins with `echo` becomes an echo backend, `echo-slow` one that takes its time, `echo-gated` one
that counts tokens only while the file `gate` beside the policy file is missing; all others are what the policy file
says.
"""

import logging
import sys
import time
from pathlib import Path

from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.server import run
from promptsluice.policies import PolicySet


class GatedEcho(EchoBackend):
    """Stands for any long computation on a request: while `gate` exists, counting says so in `entered` and waits."""

    gate: Path

    def count_tokens(self, text: str) -> int:
        while self.gate.exists():
            self.gate.with_name("entered").touch()
            time.sleep(0.01)
        return super().count_tokens(text)


def main(policy_file: str, port: str, log_level: str = "info") -> None:
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr)
    policy_set = PolicySet.load(policy_file)
    echoes = {
        name: (GatedEcho if name == "echo-gated" else EchoBackend)(
            name, models=spec.models, delay_s=0.2 if name == "echo-slow" else 0.0
        )
        for name, spec in policy_set.backends.items()
        if name.startswith("echo")
    }
    GatedEcho.gate = Path(policy_file).with_name("gate")
    app = create_app(policy_set, backends=echoes, reload_every_s=0.05)
    run(app, host="127.0.0.1", port=int(port), drain_s=policy_set.server.drain_timeout, log_level=log_level)


if __name__ == "__main__":
    main(*sys.argv[1:])
