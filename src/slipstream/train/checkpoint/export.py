"""A model's plain weights in one safetensors file, for whoever knows nothing of Slipstream."""

import os
from pathlib import Path

from torch import Tensor

from slipstream.durable import publish, temporary_sibling
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.reader import load
from slipstream.train.checkpoint.store import find_checkpoint
from slipstream.train.checkpoint.tensor_file import write_tensors
from slipstream.train.looking import looking_at


def export_weights(checkpoint: Path, output: Path, *, overwrite: bool = False) -> Path:
    """Write the parameters and buffers of `checkpoint` to `output` and return its path.

    checkpoint: a checkpoint folder, or a run folder (its latest one is taken).
    `model.load_state_dict(safetensors.torch.load_file(output))` takes it as it is, so tied tensors
    are written under each of their names. Raises CheckpointError if `output` exists and `overwrite`
    does not say to replace it, if it cannot be written, and for extra state that is no tensor.
    """
    loaded = load(find_checkpoint(checkpoint))
    tensors: dict[str, Tensor] = {}
    for name, value in loaded.model.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{loaded.path} cannot be exported: {name} is no tensor, and plain weights hold"
                " nothing else; use the checkpoint itself."
            )
        # The library refuses memory that two names share.
        tensors[name] = value.clone() if name in loaded.manifest.model.tied else value
    if not overwrite and os.path.lexists(output):
        raise _exists(output)
    with looking_at(output.parent, CheckpointError):
        has_folder = output.parent.is_dir()
    if not has_folder:
        raise CheckpointError(f"{output} cannot be written: {output.parent} is no folder; make it.")
    temporary = temporary_sibling(output)
    try:
        write_tensors(temporary, tensors, {"slipstream_step": str(loaded.step)})
        publish(temporary, output, overwrite=overwrite)
    except FileExistsError as error:
        raise _exists(output) from error
    except OSError as error:
        raise CheckpointError(
            f"{output} cannot be written ({error.strerror or error}): choose another file."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return output


def _exists(output: Path) -> CheckpointError:
    return CheckpointError(
        f"{output} exists and was not overwritten: choose another file, or ask to overwrite it."
    )
