"""Errors of the API. Torch-free."""

from typing import Any

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        message: what is wrong, and what would be right.
        status: HTTP status.
        param: field of the request.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def as_dict(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}
