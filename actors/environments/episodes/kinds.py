"""Makes the driver of a job's environment. Imports the user's code, and nothing that the kind does not need."""

from __future__ import annotations

from actors.environments.episodes.agent_call import AgentDriver
from actors.environments.episodes.child import Driver
from actors.environments.episodes.errors import EnvironmentRefused
from actors.environments.episodes.python_loop import PythonDriver, ToolEnvironment
from actors.environments.episodes.tools import Tools
from actors.environments.scoring.scorers import load_function
from configs.schema import JobConfig


def make_driver(job: JobConfig) -> Driver:
    """The driver of ``job.environment``.

    Raises:
        EnvironmentRefused, RewardRefused: what the job file names cannot be imported, or can never work.
    """
    environment, key = job.environment, "environment.path"
    if environment.kind == "agent":
        return AgentDriver(load_function(environment.path or "", key), environment.options, key)
    if environment.kind == "python":
        tools = Tools(environment.tools, environment.tool_s)
        if environment.path is None:
            return PythonDriver(ToolEnvironment, environment.options, tools, "environment.options", ready_made=True)
        return PythonDriver(load_function(environment.path, key), environment.options, tools, key)
    if environment.kind == "openenv":
        from actors.environments.episodes.openenv import OpenEnv

        options = {"url": environment.url or "", **environment.options}
        return PythonDriver(OpenEnv, options, Tools(environment.tools, environment.tool_s), "environment.url")
    if environment.kind == "verifiers":
        from actors.environments.episodes.verifiers_call import VerifiersDriver

        return VerifiersDriver(job)
    raise EnvironmentRefused(f"environment.kind: {environment.kind} has no environment to drive")
