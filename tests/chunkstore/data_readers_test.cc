// SPDX-License-Identifier: Apache-2.0
#include "chunkstore/data_readers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

namespace lamina::chunkstore {
namespace {

TEST(DataReadersTest, WaitsForSectionsThatWereEnteredBefore) {
  DataReaders readers;
  DataReaders::Section first = readers.Enter();
  DataReaders::Section second = readers.Enter();
  std::atomic<bool> done = false;
  std::thread waiting([&] {
    readers.AwaitReaders();
    done = true;
  });
  first = DataReaders::Section();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(done);
  // Ended by another thread than the one that entered.
  std::thread([moved = std::move(second)] {}).join();
  waiting.join();
  readers.AwaitReaders();  // nobody is inside
}

TEST(DataReadersTest, EndsHoweverManyReadersCome) {
  DataReaders readers;
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      DataReaders::Section section = readers.Enter();
      // Inside at every instant: the next one is entered before the last one is left.
      while (!stop) section = readers.Enter();
    });
  }
  for (int i = 0; i < 20; ++i) readers.AwaitReaders();
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

// The rule of the header, with a variable in place of a hole.
TEST(DataReadersTest, NobodyReadsWhatWasTakenAway) {
  DataReaders readers;
  std::atomic<bool> bit = true;
  uint64_t value = 1;  // not atomic: ThreadSanitizer is to see if a reader meets the evictor
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> wrong = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        const DataReaders::Section section = readers.Enter();
        if (bit && value != 1) ++wrong;
      }
    });
  }
  for (int i = 0; i < 300; ++i) {
    bit = false;
    readers.AwaitReaders();
    value = 0;
    std::this_thread::yield();
    value = 1;
    bit = true;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
}

TEST(DataReadersTest, BlobsThatAreEvictedFromAreNotCopied) {
  DataReaders readers;
  const Digest one = Digest::Of({});
  EXPECT_TRUE(readers.MayCopyFrom(one));
  readers.BeginEviction(one);
  EXPECT_FALSE(readers.MayCopyFrom(one));
  EXPECT_TRUE(readers.MayCopyFrom(Digest{}));
  readers.EndEviction(one);
  EXPECT_TRUE(readers.MayCopyFrom(one));
}

}  // namespace
}  // namespace lamina::chunkstore
