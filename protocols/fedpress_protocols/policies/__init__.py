"""Policies over rounds: which profile each round has, and each client of it."""

from fedpress_protocols.policies.accuracy_driven import AccuracyDriven
from fedpress_protocols.policies.bandwidth_aware import BandwidthAware, Link, Transfer
from fedpress_protocols.policies.course import Comparison, Course, Facts, Tally
from fedpress_protocols.policies.divergence_guard import DivergenceGuard
from fedpress_protocols.policies.steering import Policies, Policy, profiles_of, steered

__all__ = [
    "AccuracyDriven",
    "BandwidthAware",
    "Comparison",
    "Course",
    "DivergenceGuard",
    "Facts",
    "Link",
    "Policies",
    "Policy",
    "Tally",
    "Transfer",
    "profiles_of",
    "steered",
]
