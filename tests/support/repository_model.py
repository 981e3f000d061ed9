"""The model in examples/model, with less of its text to compare element types on."""

from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "examples/model"


def with_short_text(folder):
    """Make a folder of the same model whose eval.txt has 60 bytes, and return its path.

    The whole text takes ten seconds for all types.
    """
    made = folder / "model"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).symlink_to(MODEL / name)
    (made / "eval.txt").write_bytes((MODEL / "eval.txt").read_bytes()[:60])
    return made
