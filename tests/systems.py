"""Operating systems, for tests that hold on some only."""

import pytest

from fedpress_protocols import local_files

ON_WINDOWS = vars(local_files)["sys"].platform == "win32"
"""Also under `as_on_windows`."""
posix_only = pytest.mark.skipif(ON_WINDOWS, reason="Windows has no modes, and syncs no folder")
