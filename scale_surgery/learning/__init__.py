"""The whole job: set text aside, choose layers, expand, train, route, measure, verify and write one page."""
