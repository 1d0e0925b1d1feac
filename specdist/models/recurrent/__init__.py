"""Recurrent layers (Mamba, gated delta rules, short convolutions) and their states."""
