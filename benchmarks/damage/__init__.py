"""Fuzzing: damaged input for every reader of the package. damages.py makes it, readers.py reads it, campaign.py runs both."""
