"""Measurements that anyone can print again: fedpress bench."""
