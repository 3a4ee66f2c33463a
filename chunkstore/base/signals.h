// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_CHUNKSTORE_BASE_SIGNALS_H_
#define LAMINA_CHUNKSTORE_BASE_SIGNALS_H_

#include <pthread.h>
#include <signal.h>

namespace lamina {

// By which people and supervisors end a program.
inline sigset_t StopSignalSet() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) ::sigaddset(&signals, signal);
  return signals;
}

// Blocks these in this thread, and so in the threads it starts, for good: for commands that would leave
// something behind, and for those that take them with signalfd(2).
inline void BlockStopSignals() {
  const sigset_t signals = StopSignalSet();
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

// Blocks all signals in this thread, and so in the threads it starts, for as long as it lives. A
// library's thread that takes signals takes them from whoever waits for them with signalfd(2).
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace lamina

#endif  // LAMINA_CHUNKSTORE_BASE_SIGNALS_H_
