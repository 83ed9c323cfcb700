//! Many environments, stepped by a fixed pool of threads.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::environment::{begin, space_of, End, Environment};
use crate::padded::{Context, Layout};
use crate::space::Space;

/// The metrics of an episode that has ended.
pub type Metrics = Vec<(String, f64)>;

/// A step whose work takes less than this is done by the calling thread alone: waking the others
/// would take longer.
const WORTH_WAKING: Duration = Duration::from_micros(60);

/// One environment and its newest row.
struct Slot {
    environment: Box<dyn Environment>,
    over: bool, // the next step begins an episode
    context: Context,
    row: Vec<u8>,
    metrics: Option<Metrics>,
}

/// The environments of one thread.
struct Chunk {
    slots: Vec<Slot>,
    orders: Vec<(usize, usize)>, // environments to step, by slot, and their places in the message
    work: Duration,
    error: Option<(usize, String)>, // the slot that failed first, and why
}

/// What the threads do next.
#[derive(Clone)]
struct Step {
    actions: Arc<Vec<i32>>, // for each environment of the message, the values of each action in turn
    reset: bool,
}

struct Worker {
    orders: Sender<Step>,
    thread: JoinHandle<()>,
}

/// Steps environments that reset themselves on the step after the last one of an episode.
pub struct VecEnv {
    layout: Arc<Layout>,
    chunks: Vec<Arc<Mutex<Chunk>>>,
    places: Vec<(usize, usize)>, // chunk and slot of each environment
    workers: Vec<Worker>,        // worker i steps chunk i + 1; the caller steps chunk 0
    done: Receiver<()>,
    work: Duration, // of a step, a moving average
    listed: Vec<usize>,
    last_listed: Vec<u64>, // for each environment, the number of the last step that lists it
    num_steps: u64,
}

impl VecEnv {
    /// Builds one environment for each seed, on `threads` threads in all (0: one for each core).
    /// They are divided as evenly as possible.
    ///
    /// Returns an error if there is no environment, or if their spaces differ.
    pub fn new<E: Environment + 'static>(
        make: impl Fn(u64) -> E,
        seeds: &[u64],
        threads: usize,
    ) -> Result<VecEnv, String> {
        let mut slots: Vec<Slot> = vec![];
        let mut space: Option<Space> = None;
        for (i, seed) in seeds.iter().enumerate() {
            let environment = make(*seed);
            let found = space_of(&environment);
            if space.get_or_insert_with(|| found.clone()) != &found {
                return Err(format!("environment {i}: must have the spaces of environment 0"));
            }
            slots.push(Slot {
                environment: Box::new(environment),
                over: true,
                context: Context::default(),
                row: vec![],
                metrics: None,
            });
        }
        let layout = Arc::new(Layout::new(space.ok_or("a VecEnv needs at least one seed")?));
        slots.iter_mut().for_each(|slot| slot.row = vec![0; layout.size]);
        let cores = std::thread::available_parallelism().map_or(1, |number| number.get());
        let threads = if threads == 0 { cores } else { threads }.min(slots.len());
        let (mut chunks, mut places) = (vec![], vec![]);
        let total = slots.len();
        let mut left = slots.into_iter();
        for chunk in 0..threads {
            let size = (chunk + 1) * total / threads - chunk * total / threads;
            places.extend((0..size).map(|slot| (chunk, slot)));
            chunks.push(Arc::new(Mutex::new(Chunk {
                slots: left.by_ref().take(size).collect(),
                orders: vec![],
                work: Duration::ZERO,
                error: None,
            })));
        }
        let (sender, done) = channel();
        let workers = chunks[1..]
            .iter()
            .map(|chunk| worker(Arc::clone(chunk), Arc::clone(&layout), sender.clone()))
            .collect();
        Ok(VecEnv {
            layout,
            chunks,
            last_listed: vec![0; places.len()],
            places,
            workers,
            done,
            work: Duration::ZERO,
            listed: vec![],
            num_steps: 0,
        })
    }

    /// Returns the space of the environments.
    pub fn space(&self) -> &Space {
        &self.layout.space
    }

    /// Returns the number of environments.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns whether there are none, which cannot be.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns the size of one row in bytes.
    pub fn row_size(&self) -> usize {
        self.layout.size
    }

    /// Returns the number of values that the actions of one environment have.
    pub fn num_choices(&self) -> usize {
        self.layout.num_choices
    }

    /// Steps environments, by number. One whose episode is over, or all if `reset` is true, begins
    /// an episode and ignores its actions. `actions` has [`VecEnv::num_choices`] values for each
    /// listed environment.
    ///
    /// Returns an error if a number is wrong, an environment breaks the rules of its spaces or
    /// panics, or a choice is not possible; the environments must not be used after that.
    pub fn step(&mut self, listed: &[u32], actions: Vec<i32>, reset: bool) -> Result<(), String> {
        self.listed.clear();
        self.chunks.iter().for_each(|chunk| locked(chunk).orders.clear());
        if actions.len() != listed.len() * self.layout.num_choices {
            return Err("a step must have all actions of each environment".into());
        }
        self.num_steps += 1;
        for (at, number) in listed.iter().enumerate() {
            let number = *number as usize;
            let Some((chunk, slot)) = self.places.get(number).copied() else {
                let most = self.places.len();
                return Err(format!(
                    "an environment's number must be less than {most}; got {number}"
                ));
            };
            if std::mem::replace(&mut self.last_listed[number], self.num_steps) == self.num_steps {
                return Err(format!(
                    "an environment must be listed once; {number} is listed twice"
                ));
            }
            locked(&self.chunks[chunk]).orders.push((slot, at));
            self.listed.push(number);
        }
        let step = Step { actions: Arc::new(actions), reset };
        if self.work < WORTH_WAKING {
            self.chunks.iter().for_each(|chunk| run(&mut locked(chunk), &self.layout, &step));
        } else {
            for worker in &self.workers {
                worker.orders.send(step.clone()).map_err(|_| "a thread has ended")?;
            }
            run(&mut locked(&self.chunks[0]), &self.layout, &step);
            for _ in &self.workers {
                self.done.recv().map_err(|_| "a thread has ended")?;
            }
        }
        let (mut work, mut error) = (Duration::ZERO, None);
        for (number, chunk) in self.chunks.iter().enumerate() {
            let mut chunk = locked(chunk);
            work += chunk.work;
            if let Some((slot, text)) = chunk.error.take() {
                let failed = self.places.iter().position(|place| *place == (number, slot));
                error = Some(format!("environment {}: {text}", failed.unwrap_or(0)));
            }
        }
        self.work = (self.work * 7 + work) / 8;
        error.map_or(Ok(()), Err)
    }

    /// Appends the rows of the last step, one column after the other, in the order in which the
    /// environments were listed.
    pub fn write_rows(&self, out: &mut Vec<u8>) {
        let chunks: Vec<MutexGuard<Chunk>> =
            self.chunks.iter().map(|chunk| locked(chunk)).collect();
        let mut from = 0;
        out.reserve(self.layout.size * self.listed.len());
        for size in &self.layout.columns {
            for number in &self.listed {
                let (chunk, slot) = self.places[*number];
                out.extend_from_slice(&chunks[chunk].slots[slot].row[from..from + size]);
            }
            from += size;
        }
    }

    /// Takes the metrics of the episodes that ended in the last step and have any, with the place of
    /// each environment in the list.
    pub fn take_metrics(&mut self) -> Vec<(usize, Metrics)> {
        let mut found = vec![];
        for (at, number) in self.listed.iter().enumerate() {
            let (chunk, slot) = self.places[*number];
            if let Some(metrics) = locked(&self.chunks[chunk]).slots[slot].metrics.take() {
                found.push((at, metrics));
            }
        }
        found
    }
}

impl Drop for VecEnv {
    fn drop(&mut self) {
        for worker in self.workers.drain(..) {
            drop(worker.orders);
            let _ = worker.thread.join();
        }
    }
}

fn locked(chunk: &Mutex<Chunk>) -> MutexGuard<'_, Chunk> {
    chunk.lock().unwrap_or_else(PoisonError::into_inner) // panics of environments are caught
}

fn worker(chunk: Arc<Mutex<Chunk>>, layout: Arc<Layout>, done: Sender<()>) -> Worker {
    let (orders, steps) = channel::<Step>();
    let thread = std::thread::spawn(move || {
        for step in steps {
            run(&mut locked(&chunk), &layout, &step);
            if done.send(()).is_err() {
                return;
            }
        }
    });
    Worker { orders, thread }
}

/// Steps the environments of a chunk that are ordered, up to the first that fails.
fn run(chunk: &mut Chunk, layout: &Layout, step: &Step) {
    let start = Instant::now();
    let Chunk { slots, orders, error, .. } = chunk;
    for (number, at) in orders.iter() {
        let choices = &step.actions[at * layout.num_choices..][..layout.num_choices];
        let slot = &mut slots[*number];
        let result = catch_unwind(AssertUnwindSafe(|| slot.step(layout, choices, step.reset)));
        let text = match result {
            Ok(Ok(())) => continue,
            Ok(Err(text)) => text,
            Err(panic) => format!("panicked: {}", panic_text(panic.as_ref())),
        };
        *error = Some((*number, text));
        break;
    }
    chunk.work = start.elapsed();
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

impl Slot {
    fn step(&mut self, layout: &Layout, choices: &[i32], reset: bool) -> Result<(), String> {
        let first = self.over || reset;
        self.over = true;
        let environment = self.environment.as_mut();
        let obs = if first {
            begin(environment).map_err(|error| error.0)?
        } else {
            environment.act(&layout.decode(&self.context, choices).map_err(|error| error.0)?)
        };
        self.context = layout.encode(&obs, first, &mut self.row).map_err(|error| error.0)?;
        self.over = obs.end != End::No;
        self.metrics = (self.over && !obs.metrics.is_empty()).then_some(obs.metrics);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::{ActionSpace, Actions, Group, Obs, ObsSpace};
    use std::collections::HashSet;
    use std::thread::{self, ThreadId};

    crate::entity! { struct Me { seed: u64, game: usize, tick: usize } }
    crate::choices! { enum Go: "go" { On = "on", Boom = "boom" } }

    static THREADS: Mutex<Vec<ThreadId>> = Mutex::new(vec![]);

    /// Game k has k % 4 steps; games of no step are over when they begin.
    struct Ticks {
        seed: u64,
        game: usize,
        tick: usize,
        pause: Duration,
    }

    impl Ticks {
        fn see(&self) -> Obs {
            let Ticks { seed, game, tick, .. } = *self;
            Obs::new(tick as f64)
                .entities([Me { seed, game, tick }])
                .actors::<Go>(Group::all::<Me>())
                .done(tick >= game % 4)
                .metric("game", game as f64)
        }
    }

    impl Environment for Ticks {
        fn obs_space(&self) -> ObsSpace {
            ObsSpace::new().entity::<Me>(1)
        }

        fn action_space(&self) -> ActionSpace {
            ActionSpace::new().categorical::<Go>(1)
        }

        fn reset(&mut self) -> Obs {
            (self.game, self.tick) = (self.game + 1, 0);
            self.see()
        }

        fn act(&mut self, actions: &Actions) -> Obs {
            assert!(actions.of::<Go>().all(|go| go == Go::On), "boom");
            thread::sleep(self.pause);
            if !self.pause.is_zero() {
                THREADS.lock().unwrap().push(thread::current().id());
            }
            self.tick += 1;
            self.see()
        }
    }

    fn ticks(number: u64, threads: usize, pause: Duration) -> VecEnv {
        let seeds: Vec<u64> = (10..10 + number).collect();
        VecEnv::new(move |seed| Ticks { seed, game: 2, tick: 0, pause }, &seeds, threads).unwrap()
    }

    fn play(envs: &mut VecEnv, steps: usize) -> Vec<u8> {
        let listed: Vec<u32> = (0..envs.len() as u32).collect();
        let mut rows = vec![];
        for _ in 0..steps {
            envs.step(&listed, vec![0; envs.len()], false).unwrap();
            envs.write_rows(&mut rows);
        }
        rows
    }

    fn column(rows: &[u8], number: usize, from: usize) -> Vec<i32> {
        let bytes = rows[from * number..][..4 * number].chunks_exact(4);
        bytes.map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    #[test]
    fn the_number_of_threads_changes_no_row() {
        let pause = Duration::from_micros(200); // so that the threads are woken
        let alone = play(&mut ticks(5, 1, pause), 12);
        for threads in [2, 3, 5, 9] {
            THREADS.lock().unwrap().clear();
            assert_eq!(play(&mut ticks(5, threads, pause), 12), alone);
            let used: HashSet<ThreadId> = THREADS.lock().unwrap().drain(..).collect();
            assert!(used.len() >= threads.min(5), "{used:?}");
        }
    }

    #[test]
    fn episodes_follow_the_time_rules() {
        let mut envs = ticks(3, 2, Duration::ZERO);
        let mut kinds = vec![];
        for _ in 0..9 {
            let rows = play(&mut envs, 1);
            kinds.push(column(&rows, 3, 0)[1]);
            let metrics = envs.take_metrics();
            assert_eq!(metrics.len(), if kinds.last() == Some(&2) { 3 } else { 0 });
        }
        // Game 3 has three steps; game 4 is over when it begins and is skipped; game 5 has one.
        assert_eq!(kinds, [0, 1, 1, 2, 0, 2, 0, 1, 2]);
        envs.step(&[1], vec![0], true).unwrap();
        let mut rows = vec![];
        envs.write_rows(&mut rows);
        assert_eq!(column(&rows, 1, 0), [0]);
    }

    #[test]
    fn some_environments_step_in_the_order_given() {
        let mut envs = ticks(4, 2, Duration::ZERO);
        play(&mut envs, 1);
        envs.step(&[3, 1], vec![0, 0], false).unwrap();
        let mut rows = vec![];
        envs.write_rows(&mut rows);
        let seeds = &rows[2 * 20..][..24]; // after step type, count, actor, reward and discount
        let seeds: Vec<f32> =
            seeds.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
        assert_eq!(seeds, [13.0, 3.0, 1.0, 11.0, 3.0, 1.0]);
    }

    #[test]
    fn errors_name_the_environment() {
        let mut envs = ticks(4, 2, Duration::ZERO);
        play(&mut envs, 1);
        for (listed, actions, reason) in [
            (vec![4], vec![0], "less than 4; got 4"),
            (vec![1, 1], vec![0, 0], "1 is listed twice"),
            (vec![1], vec![], "all actions"),
            (vec![0, 2], vec![0, 2], "environment 2: action \"go\": a choice must be less than 2"),
            (vec![3], vec![1], "environment 3: panicked: boom"),
        ] {
            let error = envs.step(&listed, actions, false).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        assert!(VecEnv::new(|_| -> Ticks { unreachable!() }, &[], 1).is_err());
    }
}
