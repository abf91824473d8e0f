"""`validate --runtime torch`: steps of a graph, predicted (`prediction`), run (`child`), compared (`reconcile`)."""
