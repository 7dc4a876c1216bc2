"""What agents call. Each tool is a thin client of the daemon: code never runs in the process of the agent."""
