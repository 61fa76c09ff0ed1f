"""proposal + target rows -> verdict: the only place where draft tokens are accepted."""

from outrider.verification.chain import Verdict, verify_chain, verify_picks

__all__ = ["Verdict", "verify_chain", "verify_picks"]
