"""Looking at a router and setting its numbers: calibrate, report by token."""
