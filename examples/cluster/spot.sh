#!/bin/bash
# Runs a worker on a spot instance: when the provider announces that it takes the machine away, the
# worker gets SIGTERM. All workers then write a checkpoint after the same step and leave with 143.
#
#     spot.sh python3 worker.py --hosts ... --rank 1 train.py
#
# SPOT_NOTICE: address that answers 200 once the end is announced, by default that of Amazon EC2.
# Google Cloud: SPOT_NOTICE='http://metadata.google.internal/computeMetadata/v1/instance/preempted'
#     SPOT_HEADER='Metadata-Flavor: Google' SPOT_ANSWER=TRUE
set -u

notice=${SPOT_NOTICE:-http://169.254.169.254/latest/meta-data/spot/instance-action}
token_address=${SPOT_TOKEN-http://169.254.169.254/latest/api/token}
[ -z "${SPOT_NOTICE:-}" ] || token_address=${SPOT_TOKEN-}
header=${SPOT_HEADER:-}

announced() {
    local own=$header
    if [ -n "$token_address" ]; then # EC2 answers those only who have asked for a token
        own="X-aws-ec2-metadata-token: $(curl --silent --fail --max-time 2 --request PUT \
            --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$token_address")" || return 1
    fi
    curl --silent --fail --max-time 2 --header "$own" "$notice" | grep -q "${SPOT_ANSWER:-.}"
}

"$@" &
worker=$!
trap 'kill -TERM $worker 2>/dev/null' TERM INT
while kill -0 $worker 2>/dev/null; do
    if announced; then
        kill -TERM $worker
        break
    fi
    sleep "${SPOT_SECONDS:-5}" & # a signal interrupts the wait for a child, but no command
    wait $!
done
wait $worker
status=$?
while kill -0 $worker 2>/dev/null; do # a signal has interrupted the wait
    wait $worker
    status=$?
done
exit $status
