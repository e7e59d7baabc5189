"""Damaged input for every reader of the package: what is done to files, who reads them, and the campaign over both."""
