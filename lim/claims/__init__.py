"""What the paper claims, the experiments that put it to the test, and the ledger of verdicts."""

from lim.claims.evidence import Evidence
from lim.claims.lab import SCALES, Lab, Scale
from lim.claims.ledger import CLAIMS, Claim, Finding, judge, plain_json

__all__ = ["CLAIMS", "SCALES", "Claim", "Evidence", "Finding", "Lab", "Scale", "judge", "plain_json"]
