"""Where MLX is not installed, its tests are left out: `make test-mlx` runs them in an environment of their own."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("mlx") else ["test_mlx.py"]
