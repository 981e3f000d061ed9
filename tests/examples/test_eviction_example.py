"""examples/eviction.py: each policy keeps a quarter of the prompt, and loses less than a window does."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "eviction.py"


def test_losses():
    output = subprocess.run([sys.executable, SCRIPT], capture_output=True, encoding="utf-8", check=True).stdout
    found = {name.strip(): float(loss) for name, loss in re.findall(r"^(.{20}) (\d\.\d{4})", output, re.MULTILINE)}
    exact, window = found.pop("all tokens"), found.pop("window")
    assert [*found] == ["TOVA", "SnapKV", "H2O by sample", "Expected Attention", "future", "kvzip"]
    assert max(abs(loss / exact - 1) for loss in (window, *found.values())) < 0.05
    assert window != exact
