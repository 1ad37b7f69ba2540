"""What ``python -m rawattn`` runs."""
