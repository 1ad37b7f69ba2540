"""This package holds what the commands of perf/ share. No command imports another; all import from here."""
