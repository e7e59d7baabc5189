"""Measurements that documentation quotes; each module is a command."""
