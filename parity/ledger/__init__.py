"""Ledgers: what a run came to, counted from its history alone, each figure with its own denominator."""

from parity.ledger.claims import BoundClaim, claim_vtc_bound
from parity.ledger.outcomes import Figure, OutcomeLedger, Served, ledger_of, served_sessions
from parity.ledger.service import ClientReport, ServiceLedger, client_reports, service_of, starved_clients

__all__ = [
    "BoundClaim",
    "ClientReport",
    "Figure",
    "OutcomeLedger",
    "Served",
    "ServiceLedger",
    "claim_vtc_bound",
    "client_reports",
    "ledger_of",
    "served_sessions",
    "service_of",
    "starved_clients",
]
