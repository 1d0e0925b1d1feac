"""Torch modules and configurations of drafters: EAGLE-3, P-EAGLE, block drafters, MTP."""
