"""The HTTP face: routes, problems, and bounds on what a request may take."""
