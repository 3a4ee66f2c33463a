// SPDX-License-Identifier: Apache-2.0

// containerd's own tests of snapshotters, on laminad. Each of them gets a laminad of its own, the
// program that $LAMINAD names. To be built with Debian's golang-github-containerd-containerd-dev.
package conformance

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/pkg/dialer"
	"github.com/containerd/containerd/snapshots"
	"github.com/containerd/containerd/snapshots/proxy"
	"github.com/containerd/containerd/snapshots/testsuite"
	"google.golang.org/grpc"
)

const patience = 30 * time.Second

func waitForSocket(path string, ended <-chan error) error {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		select {
		case err := <-ended:
			return fmt.Errorf("laminad ended: %v", err)
		default:
		}
		if _, err := os.Stat(path); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s does not appear", path)
}

// A snapshotter in a laminad whose state is below root, and what ends it.
func newSnapshotter(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
	socket := filepath.Join(root, "snapshotter.sock")
	config := filepath.Join(root, "config.toml")
	text := fmt.Sprintf("state = %q\n[snapshotter]\nsocket = %q\n", filepath.Join(root, "state"), socket)
	if err := os.WriteFile(config, []byte(text), 0600); err != nil {
		return nil, nil, err
	}
	daemon := exec.Command(os.Getenv("LAMINAD"), "--config", config)
	log, err := os.Create(filepath.Join(root, "laminad.log"))
	if err != nil {
		return nil, nil, err
	}
	daemon.Stdout, daemon.Stderr = log, log
	daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := daemon.Start(); err != nil {
		return nil, nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	if err := waitForSocket(socket, ended); err != nil {
		daemon.Process.Kill()
		return nil, nil, err
	}
	connection, err := grpc.DialContext(ctx, dialer.DialAddress(socket),
		grpc.WithInsecure(), grpc.WithContextDialer(dialer.ContextDialer))
	if err != nil {
		daemon.Process.Kill()
		return nil, nil, err
	}
	end := func() error {
		connection.Close()
		daemon.Process.Signal(syscall.SIGTERM)
		return <-ended
	}
	return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(connection), "lamina"), end, nil
}

func TestConformance(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	testsuite.SnapshotterSuite(t, "lamina", newSnapshotter)
}
