"""fedpress's records inside Flower's messages, and what both ends derive from them.

A message to a client carries, beside what any strategy sends, a config record RECORD:

PLAN         the round's plan, JSON
ASSIGNMENT   the client's assignment, see `assignment`
SINCE        the first of the starts that went on from one another's models up to this one; left out
             where it is this one
CLIENT       the client, as the server knows it
RECEIPT      the receipt of an upload before this one, JSON; left out if there was none
RECEIPTS     the receipts of the uploads that the client's last reply asked about, a list of JSON
ARRAYS       under which name the model is among the message's array records
WEIGHT       under which name the number of examples is in the reply's metric record

and an array record for each model besides that the plan needs, named by `model_record`. In the
reply the model is replaced by one array of type STYPE, the upload's body, and RECORD holds
ASSIGNMENT again and ERROR, the relative squared error of the upload; FLATNESS, that of the update
before compression; and ASKS, a list of the assignments, of a node that this client was before,
whose uploads it has no receipt of. Under a plan with privacy terms the reply has the upload, a
weight of 1 and ASSIGNMENT, and nothing else.

With a downlink a message to train or to evaluate has in the place of the model's arrays one array
MODEL of type MODEL_STYPE, a model on its way down as SPEC.md has it, and RECORD has besides:

TASK         the task
DIGEST       the model's digest
BASE         that of the model that MODEL is a difference to; left out where it is whole
DOUBLES      the arrays that are float64 for the app; left out if there are none

Models that the plan needs beside it are differences to the message's own model. The reply's RECORD
has HOLDS, the digest of the model that the client has kept; or nothing but HOLDS, empty, where it
lacks the base: then nothing was done, and the server sends the model whole.

In a masked round RECORD has, in the place of RECEIPT:

OFFER        the session's first message
SERVER_KEY   the Ed25519 key that signs for the server, base64url
MEMBERSHIP   a `Membership`, JSON: the population, its enrolment authority, the client's certificate
ENDED        the last messages of sessions that the client may have sent a body in, and
ENDED_FOR    the assignments that these were for

and the reply has the client's Advertise in SAID, and nothing else. The
session goes on by messages whose RECORD has a STEP, one of STEPS or JOIN. They carry TASK, CLIENT,
ASSIGNMENT and HEARD, the server's answer to the step before; the reply has ASSIGNMENT and SAID, and
at the step MASKED a record BODY_RECORD with one array of type MASKED_STYPE, the body. Before a
client's first round a server that holds the authority's key asks for the client's own by JOIN, with
SERVER_KEY; the reply says it, and a signature of `joining`. All of these have the type of messages
to train, the only ones that every app has mods for.

Where training is restricted to what is sent, the mod tells its app of it by a config record SUPPORT
with INDICES, see `masking_mod`; that travels nowhere.

No Flower is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedpress_compression.tensors import ModelSpec, TensorSpec, Vector
from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.masking.transcript import statement
from fedpress_protocols.model import Model

RECORD = "fedpress"
STYPE = "fedpress.upload.v1"
BODY = "upload"
PLAN, ASSIGNMENT, CLIENT, RECEIPT = "plan", "assignment", "client", "receipt"
SINCE = "since"
ARRAYS, WEIGHT, ERROR, FLATNESS = "arrays", "weight", "nmse", "flatness"
RECEIPTS, ASKS, MOST_ASKS = "receipts", "asks", 16
MODEL, MODEL_STYPE = "model", "fedpress.model.v1"
DIGEST, BASE, DOUBLES, HOLDS = "digest", "base", "doubles", "holds"
OFFER, SERVER_KEY, MEMBERSHIP = "offer", "server-key", "membership"
ENDED, ENDED_FOR = "ended", "ended-for"
STEP, TASK, HEARD, SAID = "step", "task", "heard", "said"
JOIN, SHARES, MASKED, CONSENT, REVEAL = "join", "shares", "masked", "consent", "reveal"
STEPS = (SHARES, MASKED, CONSENT, REVEAL)
"""The messages that a session requests from a client, in order; its Advertise came with its
training."""
BODY_RECORD, MASKED_STYPE = "fedpress.body", "fedpress.masked.v1"
SUPPORT, INDICES = "fedpress-support", "indices"
Arrays = Mapping[str, npt.NDArray[Any]]


def assignment(start: int, number: int, node: int | str) -> str:
    """The name of a node's assignment in round `number` of the run's start `start`: rounds count
    from 1 in each start of a strategy. The first start's names leave it out."""
    return f"{number}-{node}" if start == 1 else f"{start}-{number}-{node}"


def start_of(name: str) -> int:
    """The start that an assignment is of."""
    start, dash, _ = name.rpartition("-")[0].rpartition("-")
    return int(start) if dash else 1


def joining(server_key: str, task: str, client_id: str) -> bytes:
    """Return the statement that a client signs to prove to this server that the key is its own."""
    return statement("flower join", server_key.encode(), task.encode(), client_id.encode())


def model_record(what: str) -> str:
    """The name of the array record with the model that `what`, "previous" or "drift", begins at."""
    return f"{RECORD}.{what}"


def spec_of(arrays: Arrays) -> ModelSpec:
    """The spec of a model of these arrays: every floating one is trained, float64 as float32.

    Raises ConfigurationError if none is.
    """
    tensors = []
    for name, array in arrays.items():
        dtype = "float32" if array.dtype == np.float64 else array.dtype.name
        tensors.append(TensorSpec(name, tuple(array.shape), dtype))
    spec = ModelSpec(tuple(tensors))
    if not spec.size:
        raise ConfigurationError(
            f"none of the model's {len(tensors)} arrays holds floating-point numbers, so there is "
            "nothing to compress"
        )
    return spec


def model_of(arrays: Arrays) -> Model:
    """These arrays as a model of `spec_of` them; raises ConfigurationError on NaN or infinity."""
    spec = spec_of(arrays)
    buffers = {t.name: arrays[t.name] for t in spec.tensors if not t.is_trained}
    return Model(spec, spec.flatten(arrays), buffers)


def moved(arrays: Arrays, spec: ModelSpec, parameters: Vector) -> dict[str, npt.NDArray[Any]]:
    """`arrays` with these trained values [spec.size], each in the type that it had."""
    trained = spec.unflatten(parameters)
    return {
        name: trained[name].astype(array.dtype) if name in trained else array
        for name, array in arrays.items()
    }


def client_seed(seed: int, index: int) -> int:
    """The seed, as `fedpress_client.Client` takes it, of the client `index` in a run of `seed`."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0]) >> 1
