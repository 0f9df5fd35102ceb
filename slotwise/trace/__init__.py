"""Where the time of a request went: ledger, lanes, records, and the trace that holds them.

Everything but `report` (which needs rich) is exported here. Nothing here imports numpy or ggml.
"""

from slotwise.trace.events import (
    Event,
    Header,
    LaneWork,
    LoanMade,
    ModelShape,
    Note,
    PhaseSpan,
    PoolFill,
    RefillDone,
    RefillTotal,
    RequestEnd,
    RequestStart,
    TraceEnd,
    WindowDone,
)
from slotwise.trace.lanes import LaneLog, LaneSpan, LaneTotal, LaneWindow
from slotwise.trace.ledger import PHASES, Ledger, LedgerRecord, PhaseRecord, Status
from slotwise.trace.perfetto import export_perfetto
from slotwise.trace.reader import Trace, read_trace
from slotwise.trace.record import (
    Conversation,
    DecodeRecord,
    DecodeTally,
    Edges,
    ExpertCounts,
    Forecast,
    Loan,
    Refill,
    RequestRecord,
    Settings,
    Tokens,
)
from slotwise.trace.sinks import TraceSink

__all__ = [
    "PHASES",
    "Conversation",
    "DecodeRecord",
    "DecodeTally",
    "Edges",
    "Event",
    "ExpertCounts",
    "Forecast",
    "Header",
    "LaneLog",
    "LaneSpan",
    "LaneTotal",
    "LaneWindow",
    "LaneWork",
    "Ledger",
    "LedgerRecord",
    "Loan",
    "LoanMade",
    "ModelShape",
    "Note",
    "PhaseRecord",
    "PhaseSpan",
    "PoolFill",
    "Refill",
    "RefillDone",
    "RefillTotal",
    "RequestEnd",
    "RequestRecord",
    "RequestStart",
    "Settings",
    "Status",
    "Tokens",
    "Trace",
    "TraceEnd",
    "TraceSink",
    "WindowDone",
    "export_perfetto",
    "read_trace",
]
