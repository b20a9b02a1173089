//! The `ridge` binary, run as users run it. Every test starts processes of its own, in folders and on ports of its own, so
//! all of them may run at the same time.

mod common;

mod bench;
mod bench_serve;
mod chat;
mod classify;
mod convert;
mod device;
mod doctor;
mod embed;
mod eval;
mod experts;
mod generate;
mod inspect;
mod manners;
mod mistakes;
mod plan;
mod plan_published;
mod plan_weights;
mod predictions;
mod pull;
mod ranks;
mod serve;
mod serve_grammars;
mod serve_hostile;
mod serve_more;
mod serve_openai;
mod serve_page;
mod serve_ready;
mod serve_rerank;
mod serve_soak;
mod tokenize;
mod train;
mod train_memory;
mod train_servers;
mod train_start;
mod train_stories;
mod worked;
