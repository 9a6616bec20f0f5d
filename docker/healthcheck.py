"""The images' HEALTHCHECK: exit code 0 when /healthz answers 200 within three seconds, 1 otherwise."""

import os
import sys
import urllib.request

PORT = os.environ.get("PROMPTSLUICE_PORT", "8000")


def main() -> int:
    """Ask the server in this container. Redirects and proxies are not followed."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{PORT}/healthz", timeout=3) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        sys.stderr.write(f"not healthy: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
