"""Expert slots: who is resident, who is read from the slow tier, what is lent to the prompt."""

from slotwise.experts.lending import Loan, LoanPrice
from slotwise.experts.loader import Experts
from slotwise.experts.pool import Arena, Pool, PoolError, minimum_slots, region_offsets
from slotwise.experts.profile import (
    Profile,
    ProfileRecorder,
    load_profile,
    profile_findings,
    save_profile,
)
from slotwise.experts.refill import RefillState
from slotwise.experts.stats import StageStats, Stats

__all__ = [
    "Arena",
    "Experts",
    "Loan",
    "LoanPrice",
    "Pool",
    "PoolError",
    "Profile",
    "ProfileRecorder",
    "RefillState",
    "StageStats",
    "Stats",
    "load_profile",
    "minimum_slots",
    "profile_findings",
    "region_offsets",
    "save_profile",
]
