"""/v1/compress without an engine: messages to the letter, reasons, errors."""

import json

from .harness import Gateway, http

MESSAGES = b'[{"role": "user", "content": "caf\\u00e9",  "x": 1.50e3}]'


def test_what_is_not_changed_is_not_touched(gateway: Gateway) -> None:
    response = http.post(f"{gateway.url}/v1/compress", content=b'{"model": "echo", "messages": %s}' % MESSAGES)
    assert response.status_code == 200 and MESSAGES in response.content
    report = response.json()
    assert report["object"] == "compression" and report["changed"] is False
    (line,) = report["segments"]
    assert line["action"] == "leave" and line["original"] == line["text"] == "café"
    assert (line["code"], line["reason"]) == ("policy_off", "the policy changes nothing")
    assert report["promptsluice"]["policy"] == response.headers["x-promptsluice-policy"] == "off"


def test_every_segment_has_its_reason(gateway: Gateway) -> None:
    table = json.dumps([{"id": n, "name": f"row {n}"} for n in range(200)], indent=4)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "model": "echo:patient",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Get the table."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": table},
            {"role": "user", "content": "How many rows are there?"},
        ],
    }
    report = http.post(f"{gateway.url}/v1/compress", json=body).json()
    assert json.loads(report["messages"][3]["content"]) == json.loads(table)
    said = [(line["code"], line["reason"]) for line in report["segments"]]
    assert len(report["messages"][3]["content"]) < len(table), (said, report["promptsluice"])
    assert all(line["reason"] and line["code"] for line in report["segments"])
    (result,) = [line for line in report["segments"] if line["role"] == "tool"]
    assert result["action"] == "compress" and result["changed"] and result["code"] == "compressed"
    assert [method["method"] for method in result["methods"] if method["used"]] == result["uses"] == ["lossless"]
    (step,) = result["steps"]
    assert step["name"] == "lossless" and step["tokens_after"] == result["tokens_after"] < step["tokens_before"]
    codes = [line["code"] for line in report["segments"] if not line["changed"]]
    assert codes == ["protected_system", "sent_before", "protected_kind", "protected_kind"]
    assert report["promptsluice"]["tokens_out"] < report["promptsluice"]["tokens_in"]


def test_what_was_planned_but_not_done_says_so(gateway: Gateway) -> None:
    plain = "Nothing in this sentence can be said in fewer words. " * 20
    turns = [("user", "Go on."), ("assistant", plain), ("user", "And?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    report = http.post(f"{gateway.url}/v1/compress", json={"model": "echo:hasty", "messages": messages}).json()
    line = report["segments"][1]
    assert not line["changed"] and line["action"] == "compress" and line["code"] == "failed"
    assert "extractive: late" in line["reason"] and report["promptsluice"]["failed"] == {"extractive": "late"}
    missing = http.post(f"{gateway.url}/v1/compress", json={"model": "echo:rag", "messages": messages}).json()
    assert missing["promptsluice"]["failed"] == {"retrieve": "collection_not_found"}
    assert all(line["reason"] and line["code"] for line in missing["segments"])


def test_errors_are_those_of_a_chat(gateway: Gateway) -> None:
    url = f"{gateway.url}/v1/compress"
    assert http.post(url, content=b"{").json()["error"]["code"] == "invalid_json"
    assert http.post(url, json={"model": "echo", "messages": []}).json()["error"]["param"] == "messages"
    assert http.post(url, json={"model": "nope", "messages": [{"role": "user", "content": "a"}]}).status_code == 404
    assert http.get(url).status_code == 405
