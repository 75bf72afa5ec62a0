"""Naming the first cause in the log of a server that failed: `signatures` knows causes, `reading` reads logs."""
