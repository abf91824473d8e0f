"""The sizing report: one step against the cards that people buy or rent, for whoever decides which and how many."""
