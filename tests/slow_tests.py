"""The tests that take longer than ``SLOW_S``: for how long, and why it is worth it.

Seconds are those of all cases of a function that are not long, beside the others of ``make test`` on two cores.
``tests/style/test_suite_budget.py`` adds them up against the budgets of ``make test`` and ``make test-cluster``: what
is new and slow has to be paid for with something that is there. ``suite_times.py`` tells at the end of a run what has
no line and wants one. They are marked ``slow``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SLOW_S: Final = 5.0
_TABLE: Final = """
tests/actors/rollout/engines/test_simulated_engine.py
      6 test_a_length_is_the_prompts_as_far_as_it_is_told_and_the_same_in_each_epoch
        tokens of thousands of whole responses are drawn
tests/actors/rollout/engines/test_vllm_adapter.py
     16 test_each_version_is_sampled_as_it_was_trained_also_behind_a_prompt_that_the_cache_knows
        a guarantee: vLLM is started, trained for and loaded anew
tests/actors/train_service/test_service_ranks.py
      8 test_two_jobs_in_turns_over_two_ranks_train_what_each_trains_alone
        a guarantee: two jobs in two processes, alone and in turns
tests/actors/trainer/backends/test_context_ranks.py
     14 test_two_ranks_that_share_each_row_score_learn_and_step_as_one_does
        policy, critic and reference, by one process and by two that import torch, over four forms of rows
tests/actors/trainer/backends/test_fsdp_elsewhere.py
     16 test_a_copy_over_two_machines_trains_publishes_and_saves_the_bits_of_one_machine
        two ranks, on one machine and on two with and without a common file system
tests/actors/trainer/backends/test_kept_experts.py
     10 test_two_ranks_train_what_one_process_trains
        a guarantee: tokens travel to experts in two ranks, in five ways to train
tests/chaos/test_agents.py
     15 test_an_agent_outside_trains_a_step_over_plain_http
        an agent at the gateway of a run
tests/chaos/test_cluster.py
     13 test_the_head_is_killed_nodes_leave_and_join_and_the_job_goes_on_with_nothing_lost
        a head and three nodes over TCP, harmed one after the other
tests/chaos/test_elastic.py
     55 test_machines_come_and_go_by_a_trace_and_what_a_noticed_one_cannot_finish_is_handed_over_with_its_tokens
        answers and notices of seconds, on machines that have to start first
     21 test_samples_move_to_a_worker_that_comes_in_the_middle_of_a_step
        a worker starts in the middle of a step
tests/chaos/test_episodes.py
     20 test_the_preset_plays_its_games_in_turns_through_the_gateway
        the shipped preset with its real model, tokens agreed on
tests/chaos/test_faults.py
     37 test_a_plan_of_every_kind_is_carried_out_and_the_run_is_none_the_worse
        eleven faults, each of which takes its second or two
     20 test_a_run_that_is_killed_as_a_whole_is_told_as_crashed_and_its_resumption_is_clean
        two lives of a whole run
     34 test_each_process_of_a_run_may_be_killed_over_the_control_socket_and_what_cannot_be_done_is_refused
        the first of the guarantees: five processes are started again
tests/chaos/test_full_disk.py
     18 test_a_full_disk_costs_no_sample_and_trains_none_twice
        two lives of a run on a disk of its own
tests/chaos/test_head.py
     11 test_a_head_that_ends_again_and_again_ends_the_run_with_a_message
        a head is killed four times
     38 test_a_run_survives_its_head_and_no_role_process_is_started_again
        two modes, whose heads are killed and stopped seven times
      6 test_a_second_interruption_ends_the_run_at_once
        a run is started and ended
tests/chaos/test_installed.py
     10 test_folders_with_our_names_beside_the_job_file_break_nothing
        a run of a built wheel
      9 test_presets_are_found_by_name_and_bench_says_what_it_needs
        a wheel is built, and five commands of it run
tests/chaos/test_keys.py
      9 test_a_head_on_all_interfaces_takes_jobs_of_its_operator_only
        commands of four people at a head
     27 test_a_run_on_all_interfaces_obeys_its_operator_shows_its_reader_and_ignores_the_rest
        a guarantee: commands of six people at a run with a node
tests/chaos/test_looking_into_a_run.py
     15 test_every_process_is_seen_and_one_that_was_stopped_is_seen_to_be_silent
        each process has to tell of its health, and one to be silent
tests/chaos/test_mixed_data.py
     23 test_a_run_that_was_killed_goes_on_with_the_same_prompts_in_the_same_order
        a guarantee: two lives of a run on data of a hub
tests/chaos/test_other_users.py
     26 test_another_user_of_the_machine_is_refused_everything_and_the_run_goes_on
        a guarantee: two runs, attacked in forty ways
tests/chaos/test_python_api.py
     10 test_a_run_ends_with_a_checkpoint_when_nobody_holds_it_any_more
        a run is started by a program
tests/chaos/test_random_frames.py
     13 test_random_frames_on_every_socket_leave_a_run_unharmed_and_are_counted
        ten thousand frames to each of eighteen sockets of a run
tests/chaos/test_replicas.py
     35 test_one_copy_over_two_machines_learns_what_one_machine_does_though_a_rank_is_killed
        a guarantee: torch ranks of two runs, one of which is harmed
tests/chaos/test_same_weights.py
     51 test_an_interrupted_run_goes_on_as_if_nothing_had_happened
        a guarantee: two lives of a torch run, bit for bit
     70 test_with_killed_workers_and_heads_and_with_evaluation_beside_it_the_trained_weights_are_the_same_bit_for_bit
        two guarantees: a torch run that is harmed and evaluated, and the undisturbed one
tests/chaos/test_seeding.py
     26 test_another_machine_takes_over_when_the_window_ends_and_the_trainers_workers_sleep
        windows of seconds, and a machine that starts
tests/chaos/test_servers.py
     16 test_a_server_that_is_started_again_with_the_first_weights_costs_no_sample_and_none_of_its_old_tokens_is_trained
        a guarantee: a run with a server that is started again in its middle
tests/chaos/test_services.py
     33 test_jobs_share_a_service_through_its_death_and_the_heads_and_the_one_that_waits_gets_its_turn
        a guarantee: three jobs, a service and a head that are started again
tests/chaos/test_several_jobs.py
     45 test_two_jobs_one_with_machines_of_its_own_lose_nothing_under_a_plan_that_harms_both_and_their_head
        two jobs under one head, both of which and the head are harmed
tests/chaos/test_slurm.py
      8 test_a_machine_whose_environment_hangs_is_ended_with_what_it_has_said_last
        Slurm has to end a job that hangs
     56 test_machines_are_preempted_lost_and_unheard_of_and_nothing_is_lost_or_trained_twice_or_left
        a guarantee: four machines of a Slurm, which has its own clock
     10 test_what_the_cluster_would_refuse_ends_the_run_before_it_begins_in_the_clusters_own_words
        three commands, each refused by a Slurm
tests/chaos/test_strangers_among_ranks.py
      8 test_another_user_cannot_take_a_ranks_place_nor_hold_up_the_meeting
        an attack on two ranks that start, each of which imports torch
tests/chaos/test_terminal.py
     24 test_a_run_outlives_its_readers_keeps_its_directory_and_takes_a_checkpoint_when_its_terminal_closes
        two lives of a run, and two commands that are refused
tests/chaos/test_vllm.py
     54 test_vllm_workers_and_their_node_are_killed_and_every_sample_goes_on
        vLLM is started twice
tests/hosts/test_replicas.py
     40 test_one_copy_over_two_hosts_learns_and_publishes_what_one_host_does_though_the_second_host_is_lost
        torch ranks on one host, and on three of which one is cut off
     35 test_two_hosts_train_along_and_when_the_link_between_them_is_cut_another_host_takes_the_replica
        torch ranks on three hosts, one of which is cut off
tests/hosts/test_three_hosts.py
     38 test_a_run_over_three_hosts_goes_on_when_a_link_is_cut_and_its_node_comes_back
        three hosts, one of which is cut off until it is noticed
tests/supervisors/jobs/test_hub_data.py
      6 test_without_a_hub_the_cache_does_and_without_both_one_sentence_says_so
        three processes fetch data, each with the libraries for it
tests/supervisors/preparation/test_reward_preparation.py
      7 test_a_critic_begins_as_the_reward_model_that_the_job_trains
        a reward model is trained in a process of its own
      8 test_a_model_is_trained_once_and_later_runs_and_lives_find_it
        a reward model is trained in a process of its own
      7 test_one_whose_process_is_killed_is_told_and_one_that_is_given_up_leaves_nothing
        two trainings in processes of their own are cut short
      7 test_what_is_wrong_with_preferences_is_said_as_it_stands_in_the_job
        two trainings in processes of their own refuse their data
tests/supervisors/preparation/test_tiny_model.py
      6 test_a_maker_that_fails_is_told_with_its_last_words_and_nothing_is_kept
        a model is made in a process of its own
      6 test_what_a_folder_of_the_user_is_called_does_not_matter_to_the_maker
        a model is made in a process of its own
tests/supervisors/serving/test_serve.py
     16 test_the_unmodified_client_trains_an_adapter_and_samples_what_was_trained
        a guarantee: the command, with its four processes that import torch
tests/supervisors/simulation/test_seeding.py
      7 test_when_other_machines_are_lost_after_the_window_a_dry_trainer_generates_again_and_is_done_sooner
        four simulations of long jobs
tests/supervisors/simulation/test_seeds.py
     14 test_no_fixed_seed_breaks_a_promise
        eighteen simulations of the shipped scenarios
tests/supervisors/simulation/test_simulate.py
      8 test_equal_seeds_give_equal_hashes_in_other_processes_with_other_string_hashes
        simulations in other processes
"""


class Slow(NamedTuple):
    seconds: float
    reason: str


def _read(table: str) -> dict[str, Slow]:
    """A file stands by itself; of each of its tests there are seconds and name, and below them the reason."""
    found: dict[str, Slow] = {}
    file = name = seconds = ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            file, name = line, ""
        elif not name:
            seconds, name = line.split()
        else:
            found[f"{file}::{name}"], name = Slow(float(seconds), line.strip()), ""
    return found


SLOW: Final = _read(_TABLE)
"""Test function → its line."""
