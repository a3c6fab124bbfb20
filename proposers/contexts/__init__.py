"""What drafters know of texts: which tokens they have computed and which not yet, and what their rows attend to."""
