"""Parts of `agent_sessions`: agents whose contexts fill the fleet's KV caches."""
