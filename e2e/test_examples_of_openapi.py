"""The examples in `/openapi.json` are requests that the gateway answers."""

from __future__ import annotations

from e2e.servers import Fleet


def test_each_example_is_answered(fleet: Fleet) -> None:
    paths = fleet.gateway.get("/openapi.json").json()["paths"]
    examples = {
        path: content["application/json"]["example"]
        for path, methods in paths.items()
        for method, operation in methods.items()
        if method == "post" and "application/json" in (content := operation.get("requestBody", {}).get("content", {}))
    }
    assert len(examples) > 15
    session = fleet.gateway.post("/v1/sessions", json=examples["/v1/sessions"]).json()["id"]
    lines = {"file": ("lines.jsonl", b"{}"), "purpose": (None, "batch")}
    examples["/v1/batches"]["input_file_id"] = fleet.gateway.post("/v1/files", files=lines).json()["id"]
    in_turn = ("/v1/variables", "/v1/submit", "/v1/get")
    for path in [*(path for path in examples if path not in in_turn), *in_turn]:
        body = examples[path] | ({"session_id": session} if path in in_turn else {})
        answer = fleet.gateway.post(path, json=body)
        assert answer.status_code in {200, 201}, f"{path}: {answer.status_code} {answer.text}"
