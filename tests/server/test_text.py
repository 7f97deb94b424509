"""Text that a database cannot hold is refused at the door, whichever database it is."""

import pytest

from fedpress_protocols.errors import MalformedRequest
from fedpress_protocols.model import Model
from tests.devices import Device, Operator
from tests.server.in_process import Clock, Enrolled, Server

pytestmark = pytest.mark.both_databases(short=True)
NUL = "a\\u0000b"


def test_a_nul_is_no_text(
    http: Server, operator: Operator, enrolled: Enrolled, clock: Clock, model: Model
) -> None:
    with pytest.raises(MalformedRequest, match="note"):
        operator.post("/v1/admin/tokens", {"uses": 1, "expires_in": 60, "note": "a\0b"})
    with pytest.raises(MalformedRequest, match="name"):
        Device(http, clock).enrol(operator.token(), NUL)
    operator.begin(model)
    with pytest.raises(MalformedRequest, match="attributes"):
        enrolled().json(
            "POST",
            "/v1/tasks/digits/check-in",
            f'{{"pending": [], "wait": 0, "attributes": {{"region": "{NUL}"}}}}',
        )
