"""Starts a real gateway process for the tests: `launcher.py POLICY_FILE PORT [LOG_LEVEL]`.

A backend whose name begins with `echo` becomes an echo backend, `echo-slow` one that takes its time; all others are
what the policy file says.
"""

import logging
import sys

from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.server import run
from promptsluice.policies import PolicySet


def main(policy_file: str, port: str, log_level: str = "info") -> None:
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr)
    policy_set = PolicySet.load(policy_file)
    echoes = {
        name: EchoBackend(name, models=spec.models, delay_s=0.2 if name == "echo-slow" else 0.0)
        for name, spec in policy_set.backends.items()
        if name.startswith("echo")
    }
    app = create_app(policy_set, backends=echoes)
    run(app, host="127.0.0.1", port=int(port), drain_s=policy_set.server.drain_timeout, log_level=log_level)


if __name__ == "__main__":
    main(*sys.argv[1:])
