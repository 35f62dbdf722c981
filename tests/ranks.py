"""What tests import to run ranks: the package's own launcher."""

from vlm_cp.launch import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
