"""The error tree on the wire."""

from promptsluice.prompt import BadRequest, ConfigError, ContextTooLong, Overloaded, Report, StepReport, Usage


def test_wire_form_is_the_openai_error_object() -> None:
    error = BadRequest("temperature must be between 0 and 2", param="temperature")
    assert error.to_wire() == {
        "error": {
            "message": "temperature must be between 0 and 2",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": None,
        }
    }
    assert ContextTooLong("too long").to_wire()["error"]["code"] == "context_length_exceeded"


def test_overloaded_tells_when_to_come_back() -> None:
    assert Overloaded("full", retry_after=2.3).headers == {"retry-after": "3"}


def test_config_errors_name_file_and_line() -> None:
    assert str(ConfigError("unknown key", file="p.yaml", line=3)) == "p.yaml:3: unknown key"
    assert str(ConfigError("unknown key")) == "unknown key"


def test_usage_and_report_on_the_wire() -> None:
    usage = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=7)
    assert usage.to_wire()["total_tokens"] == 12
    assert usage.to_wire()["prompt_tokens_details"] == {"cached_tokens": 7}
    report = Report(
        policy="mißt", tokens_in=9, steps=[StepReport(name="lossless", ms=1.0, tokens_before=9, tokens_after=8)]
    )
    headers = report.headers()
    assert headers["x-promptsluice-steps"] == "lossless"
    assert headers["x-promptsluice-policy"].isascii()
    assert report.to_wire()["steps"][0]["tokens_after"] == 8
