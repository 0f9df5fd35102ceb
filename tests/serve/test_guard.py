"""Who may come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serve.served import Served

from slotwise.errors import UsageError
from slotwise.serve.guard import PUBLIC
from slotwise.serve.settings import ServeSettings


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "example.com", "::"])
def test_no_key_no_other_machine(host: str) -> None:
    with pytest.raises(UsageError, match="no --api-key"):
        ServeSettings(host=host)
    ServeSettings(host=host, api_keys=("k",))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "127.9.9.9", "[::1]:8080"])
def test_loopback_s_own_names(served: Served, host: str) -> None:
    assert served.get("/health", Host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.1", "["])
def test_another_name_for_this_address_is_refused(served: Served, host: str) -> None:
    answer = served.get("/v1/models", Host=host)
    assert answer.status == 403
    assert answer.error["code"] == "unknown_host"


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:1", "null"])
def test_a_page_of_another_origin_is_refused(served: Served, origin: str) -> None:
    answer = served.send("POST", "/v1/completions", b'{"prompt":"x"}', Origin=origin)
    assert answer.status == 403
    assert answer.error["code"] == "foreign_origin"
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_page_s_own_origin_is_not(served: Served) -> None:
    answer = served.send("POST", "/v1/completions", b'{"prompt":"x"}', Origin=served.url)
    assert answer.status == 200


def test_an_origin_that_was_allowed(serve: Callable[..., Any]) -> None:
    with serve(cors_origins=("https://app.example",)) as served:
        origin = {"Origin": "https://app.example"}
        asked = served.send("OPTIONS", "/v1/chat/completions", **origin)
        assert asked.status == 204
        assert asked.headers["access-control-allow-origin"] == "https://app.example"
        assert served.get("/v1/models", **origin).status == 200
        assert served.get("/v1/models", Origin="https://other.example").status == 403


def test_keys(serve: Callable[..., Any]) -> None:
    with serve(api_keys=("first", "second")) as served:
        for path in ("/v1/models", "/metrics", "/v1/requests", "/props"):
            answer = served.get(path)
            assert answer.status == 401
            assert answer.error["type"] == "authentication_error"
        for path in PUBLIC:
            assert served.get(path).status == 200
        for key in ("first", "second"):
            assert served.get("/v1/models", Authorization=f"Bearer {key}").status == 200
            assert served.get("/v1/models", X_Api_Key=key).status == 200
        for wrong in ("Bearer firs", "Bearer firstt", "Basic first", "Bearer ", "first"):
            assert served.get("/v1/models", Authorization=wrong).status == 401
        assert served.get("/health", Host="any.example").status == 200


def test_the_page_may_load_nothing_from_elsewhere(served: Served) -> None:
    answer = served.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert b"http:" not in answer.body
    assert b"https:" not in answer.body
