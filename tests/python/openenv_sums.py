"""A server of OpenEnv with a tool, as small as can be. In an episode of a row with `"broken": true`, it fails."""

from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Sums(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(server)
        self._state = State()

    def reset(self, seed=None, episode_id=None, broken=False):
        self._broken = broken
        self._state = State(episode_id=episode_id)
        return Observation()

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            if self._broken:
                raise RuntimeError("out of numbers")
            observation.reward = 0.0 if observation.error else 1.0
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=True)

    @property
    def state(self):
        return self._state


app = create_app(Sums, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=32)
