"""Errors as a client sees them: a status and OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotwise.errors import PromptTooLong, Refused, SlotwiseError, StoreError, UsageError


class ApiError(Exception):
    """An answer that is an error. `code` is a short stable name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        by_status = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            429: "rate_limit_error",
            503: "unavailable_error",
        }
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return by_status.get(self.status, fallback)

    def to_dict(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def from_exception(error: BaseException) -> ApiError:
    """What a client is told of an error in the engine's rooms; of a defect only its kind."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StoreError):
        return ApiError(500, f"an expert could not be read: {error.cause}", code="store_error")
    if isinstance(error, SlotwiseError):
        step = f". {error.next_step}" if error.next_step else ""
        theirs = isinstance(error, UsageError | Refused) or "chat template" in str(error)
        code = "invalid_request" if theirs else "engine_error"
        fault = ApiError(400 if theirs else 500, f"{error}{step}", code=code)
        if isinstance(error, PromptTooLong):
            fault.code, fault.param = "context_length_exceeded", "messages"
        return fault
    if isinstance(error, MemoryError):
        return ApiError(500, "out of memory", code="out_of_memory")
    kind = type(error).__name__
    message = f"internal error: {kind}. The server goes on; its log says where it happened."
    return ApiError(500, message, code="internal_error")
