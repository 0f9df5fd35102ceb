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
from slotwise.experts.replay import Replayed, Traffic, belady, replay
from slotwise.experts.routing import Routing, RoutingRecorder, load_routing, save_routing
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
    "Replayed",
    "Routing",
    "RoutingRecorder",
    "StageStats",
    "Stats",
    "Traffic",
    "belady",
    "load_profile",
    "load_routing",
    "minimum_slots",
    "profile_findings",
    "region_offsets",
    "replay",
    "save_profile",
    "save_routing",
]
