"""Every wait of a program of several nodes, in seconds, with the reason for its length.

The waits at the end of a program are nested, and each must be longer than those inside it. The end
of this module asserts their order. The module imports almost nothing, so that the lightest process
can import it.
"""

from __future__ import annotations

from typing import NamedTuple

# Reports. Nodes learn what to do from the answers to their reports.

# Between two reports of a node. Nodes follow the coordinator with about this delay.
REPORT_PERIOD = 0.2
# The same for nodes that report together, while one of them waits for a grant of frames: a run's
# end takes several reports of each. Alone, a node that waits reports with BUDGET_POLL.
REPORT_PERIOD_AT_LIMIT = 0.05
# Between two looks of a node for the answer, where the nodes of a host report together.
REPORTS_LOOK = 0.02
# Between two checks of a loop that only waits for the next phase; below the period of reports, so
# that no report is late.
PHASE_POLL = 0.1
# The same in the learner, whose last checkpoint other nodes wait for.
LEARNER_PHASE_POLL = 0.05
# What a node does is named if it takes this long; shorter waits need no explanation.
PHASE_SHOWN = 2.0
# A node is shown as silent after about fifty missing reports, counted while the coordinator runs.
# Not sooner, because on few cores a healthy actor may take seconds for a step or a compilation.
SHOWN_AS_SILENT = 10.0
# The learner takes the coordinator for lost when it has not answered for this long; it then saves
# and fails, which ends the program. Not shorter, because a coordinator may be stopped or starved
# for many seconds and continue. It counts only while the learner itself runs.
COORDINATOR_LOST = 30.0
# The other nodes wait longer, so that the learner can save before the replay ends.
COORDINATOR_LOST_TO_OTHERS = 40.0
# A program that starts many nodes on few cores takes minutes, and its coordinator may be late too.
# A node waits this long for its first answer; the launcher ends it sooner if the coordinator fails.
START = 600.0
# The most that one attempt to reach a node adds to the time for which that node was silent: a call
# and the pause after it. An attempt takes longer only if the caller itself was stopped.
ATTEMPT = 12.0
# The learner reports between updates, but an update, a compilation or a checkpoint may take
# minutes. So a thread of it sends a sign of life with this period...
HEARTBEAT = 2.0
# ...and without a sign for this long, the coordinator ends the program.
LEARNER_LOST = 60.0
# Where the learners of several policies may restart, one that has been silent for this long is
# lost, until its next sign: a few signs are missing. Actors then go on without it.
LEARNER_ABSENT = 5.0
# One that was started again waits this long before it begins. Actors look once a second whether
# the owner of their replay's memory has ended; then they free it, and the new memory fits. And all
# nodes have reported which params they have, so that the new ones get a later version.
LEARNER_RETURN = 1.5
# The display's period. Twice a second reads as continuous and costs the coordinator little.
DISPLAY_PERIOD = 0.5

# Waiting for other nodes while the program runs. Each is cut into pieces, and between two pieces
# the node asks whether the program still runs.

# A learner without items; short, because it also decides how soon a checkpoint that is due begins.
LEARNER_SAMPLE = 0.2
# A learner that asks another one for its part of a checkpoint, in one call: an answer takes no
# computation, and the learner that asks has more to do.
ASK_PART = 1.0
# Between two requests of an actor for new earlier versions of a policy. Nodes learn of everything
# else with this delay too.
EXCHANGE_PERIOD = REPORT_PERIOD
# One such request, where learners may restart: the actor acts for other policies too, and goes on
# without a learner that is lost. An answer takes no computation, but may be large.
EXCHANGE = 2.0
# Between two such requests to a learner that has not given its part: it may have been restarted.
ASK_PART_AGAIN = 1.0
# Between two checks for the parts; they are small next to what writing a checkpoint takes.
PARTS_POLL = 0.02
# An actor whose replay is full.
ACTOR_ADD = 1.0
# An actor at the barrier of lock-step, in one call. Well below the deadline of calls (10 s).
BARRIER_CALL = 5.0
# An actor that may not act before others have reported, at the end of training; it makes few calls.
BUDGET_POLL = 0.01
# An actor that has reported for a round, in one call; with it, reports are still in time.
ROUND_WAIT = 0.2
# A pull of params in rounds, which waits for newer params at the learner.
NEXT_PARAMS = 2.0
# Processes of one host share params: one asks the learner, for the time of a call, and the others
# look again after this pause...
SHARED_PARAMS_LOOK = 0.005
# ...and ask themselves if the one has not answered for this long, because it was stopped. Nodes
# that report together do so too.
SHARED_PARAMS = 12.0
# A host that gets params from another host waits this long until that one has them, then it asks
# the learner...
PARAMS_SHARE = 1.0
# ...as it does when that host does not answer. The call takes longer than the wait, because the
# params may be large. The learner then names the other host to nobody for a while.
PARAMS_SHARE_CALL = 4.0
PARAMS_AVOID = 60.0
# Pulls of params may fail for this long before acting fails. A learner that has failed ends the
# program much sooner, and a learner that compiles or saves may delay a pull.
PARAMS_PULL = 30.0
# The same where learners may restart. One that stays silent ends the program sooner.
PARAMS_PULL_RESTART = 90.0

# Restarts of actors, inference services and the evaluator.


class Restarts(NamedTuple):
    """Pauses before restarts."""

    first_pause: float
    longest_pause: float
    forgotten_after: float
    at_once: float


# The first pause is short, since most failures are accidents. It doubles, so that a node that
# always fails does not keep the machine busy. A node that ran for a minute had started well: its
# earlier failures no longer count. A node that worked for ten seconds has done more than repeat the
# steps that failed before: the same error is an accident again.
RESTARTS = Restarts(first_pause=0.2, longest_pause=10.0, forgotten_after=60.0, at_once=10.0)
# Between two checks of a supervisor for a signal, in the pause before a restart.
SUPERVISOR_POLL = 0.02

# The end of a program. The coordinator announces it and the nodes end by themselves.

# The coordinator keeps running for at most this long, and every live node reports several times.
COORDINATOR_LINGER = 1.0
# ...and, if there are callbacks, until the command has read the last events: a few of its periods.
EVENTS_LINGER = 4 * DISPLAY_PERIOD
# All nodes are told at the same time: the command must have ended within 10 s, whatever failed.
# A Reverb server that is asked to end keeps running for this long: the learner is asked at the same
# time, and first has the server write the contents of the replay.
REPLAY_LINGER = 3.0
# With several policies, the learner that writes the checkpoint is asked to end at the same time as
# the learners that contribute their parts. These stay up for this long, and it waits this long.
PARTS_AT_END = 3.0
# From SIGTERM to SIGKILL, for nodes that hold nothing to save.
GRACE = 2.0
# The same for the learner, the replay and the coordinator, which save.
GRACE_TO_SAVE = 6.0
# The same for launchers, which signal the supervisors of all nodes.
NODES_NOTICE = 7.0
# From a call to stop to the end of a node's process under Ray, where nodes have no
# supervisors.
RAY_GRACE = 6.5
# An interrupted program has this long to save and end; a large replay takes several seconds.
INTERRUPTED = 20.0
# The same with nothing to save, as when its nodes are still starting.
INTERRUPTED_WITHOUT_STATE = 3.0

# Launchers.

# Between two checks of the launched processes, of signals and of Ray's answers.
LAUNCHER_POLL = 0.1
# For the coordinator to answer a launcher, while a user waits for the program to end.
ASK_COORDINATOR = 2.0
# For telling the coordinator that a node has moved; tried again at the next check.
TELL_COORDINATOR = 1.0
# For one status of the display; a coordinator may take long to start, and the display can wait.
DISPLAY_CALL = 60.0

# Ray.

# How long one call waits in a node's process for the end of the node.
RAY_WATCH_CALL = 3.0
# For the ends of logs on other hosts, at the end; Ray starts a process there to read them.
RAY_LOGS = 5.0
# Before a process that Ray cannot reach is asked again.
RAY_RETRY = 0.5
# After a failure: for learning of the failure of another node that caused this one.
RAY_CAUSE = 3.0
# Between two looks at the hosts of the cluster, for those that join it or will leave it.
RAY_HOSTS = 2.0
# The head of the cluster is taken for lost after this long at most: after a minute Ray ends all
# processes, and until then the program must have saved.
RAY_HEAD = 30.0
# A host that stopped answering gets no new nodes for this long.
RAY_AVOID_HOST = 60.0

# Object stores.

# Between two looks at the run directory for what the store lacks. A look with changes makes
# several requests, which cost money, and readers see the run with this delay.
STORE_PERIOD = 10.0
# A command on another host is taken for dead when its lease has not changed for this long: six
# periods, or the time of eight pieces of a file on a slow link.
STORE_LEASE = 60.0
# A request is repeated for this long; then readers fail, and a run goes on without the store...
STORE_ANSWER = 20.0
# ...for this long by default. Longer outages of stores are rare, and the disk may fill up.
STORE_AWAY = 600.0
# A reader does not look again before: top and dashboard look every two seconds.
STORE_READ = 2.0
# The same for lists of all runs, which need a request for each folder.
STORE_LIST = 15.0

assert PHASE_POLL < REPORT_PERIOD
assert REPORTS_LOOK < REPORT_PERIOD_AT_LIMIT < REPORT_PERIOD
assert 4 * REPORT_PERIOD < COORDINATOR_LINGER < COORDINATOR_LOST
assert ROUND_WAIT <= REPORT_PERIOD and NEXT_PARAMS < SHARED_PARAMS < PARAMS_PULL
assert PARAMS_SHARE < PARAMS_SHARE_CALL and NEXT_PARAMS + PARAMS_SHARE_CALL < SHARED_PARAMS
assert REPORT_PERIOD < SHOWN_AS_SILENT < COORDINATOR_LOST
# A node takes another for lost after several attempts, and the learner has time to save.
assert 2 * ATTEMPT < COORDINATOR_LOST < COORDINATOR_LOST_TO_OTHERS - GRACE_TO_SAVE
# The learner's own complaint about the coordinator comes first, since it has then saved.
assert 4 * HEARTBEAT < COORDINATOR_LOST < LEARNER_LOST
assert COORDINATOR_LOST_TO_OTHERS < START
assert 2 * HEARTBEAT < LEARNER_ABSENT < LEARNER_LOST < PARAMS_PULL_RESTART
assert 1.0 + 2 * REPORT_PERIOD < LEARNER_RETURN
assert REPLAY_LINGER < GRACE_TO_SAVE
assert PARTS_POLL < LEARNER_SAMPLE and PARTS_AT_END + 2 * ASK_PART < GRACE_TO_SAVE
# A waiting node learns of the end within its grace period.
assert max(LEARNER_SAMPLE, ACTOR_ADD) + REPORT_PERIOD < GRACE
assert BARRIER_CALL + REPORT_PERIOD < GRACE_TO_SAVE
# A process that ends others waits longer than they take to end.
assert GRACE < INTERRUPTED_WITHOUT_STATE < GRACE_TO_SAVE
assert REPLAY_LINGER < GRACE_TO_SAVE < RAY_GRACE < NODES_NOTICE < INTERRUPTED
assert 5 * STORE_PERIOD < STORE_LEASE < STORE_AWAY
assert STORE_ANSWER < STORE_LEASE
assert RAY_HOSTS + RAY_HEAD + INTERRUPTED + RAY_GRACE < 60.0
assert ASK_COORDINATOR < INTERRUPTED_WITHOUT_STATE
