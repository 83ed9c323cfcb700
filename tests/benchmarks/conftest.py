"""Makes the benchmarks importable; they run from the repository and are not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
