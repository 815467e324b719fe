"""How lanes are run: inline or on worker processes, with one piece of code that opens, advances and captures a lane."""
