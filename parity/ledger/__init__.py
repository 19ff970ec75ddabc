"""Ledgers: what a run came to, counted from its history alone, each figure with its own denominator."""

from parity.ledger.claims import (
    BoundClaim,
    Coordinates,
    Measurement,
    NotComparable,
    claim_vtc_bound,
    difference,
)
from parity.ledger.outcomes import Figure, OutcomeLedger, Served, ledger_of, served_sessions
from parity.ledger.rows import causal_pairs, history_rows, prefill_chunks, realised_rows
from parity.ledger.service import ClientReport, ServiceLedger, client_reports, service_of, starved_clients

__all__ = [
    "BoundClaim",
    "ClientReport",
    "Coordinates",
    "Figure",
    "Measurement",
    "NotComparable",
    "OutcomeLedger",
    "Served",
    "ServiceLedger",
    "causal_pairs",
    "claim_vtc_bound",
    "client_reports",
    "difference",
    "history_rows",
    "ledger_of",
    "prefill_chunks",
    "realised_rows",
    "served_sessions",
    "service_of",
    "starved_clients",
]
