"""Public MXNet scripts of the corpus: their names, and the few changes that each needs.

The texts are those of github.com/apache/mxnet at version 1.9.1, of github.com/dmlc/gluon-cv, and of
github.com/dmlc/gluon-nlp at version 0.10; none is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Script:
    """A public script.

    Args:
        path: Path below the checkout.
        edits: Changes for lbbsp, which count.
        small: Replacements that make the data or the model small, which do not count.
        arguments: Command line; "{each}" stands for 24, divided by the number of workers.
        modules: Further files of the script's folder: name, `small`, and `edits` of each.
        data: Recipe of `mxnet_data` for the files that the script reads.
        double: Whether numbers are float64.
        in_cluster: Whether the one process needs a store of a cluster.
        words: Remark for the table.
    """

    path: str
    edits: Edits
    small: Edits = ()
    arguments: str = ""
    modules: tuple[tuple[str, Edits, Edits], ...] = ()
    data: str = ""
    double: bool = True
    in_cluster: bool = False
    words: str = ""

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.path.rpartition("/")[2]

    @property
    def name(self) -> str:
        """Name of the file without its suffix."""
        return self.file.partition(".")[0]

    @property
    def batch_norm(self) -> bool:
        """Whether the script synchronises batch normalisation."""
        return any("SyncBatchNorm" in after for *_, edits in self.parts for _, after in edits)

    @property
    def parts(self) -> Iterator[tuple[str, Edits, Edits]]:
        """Files that are edited: the name, `small`, and `edits` of each."""
        yield self.file, self.small, self.edits
        yield from self.modules


IMPORT = ("import mxnet as mx\n", "import lbbsp_mx\nimport mxnet as mx\n")
TRAINER = ("trainer = gluon.Trainer(", "trainer = lbbsp_mx.Trainer(")
CIFAR_SET = (
    "        train_data = gluon.data.DataLoader(\n"
    "            gluon.data.vision.CIFAR10(train=True)"
    ".transform_first(transform_train),\n"
    "            batch_size=batch_size, shuffle=True, last_batch='discard', "
    "num_workers=num_workers)\n",
    "        train_set = gluon.data.vision.CIFAR10(train=True).transform_first(transform_train)\n",
)

SCRIPTS = (
    Script(
        "example/gluon/mnist/mnist.py",
        edits=(
            IMPORT,
            (
                "train_data = gluon.data.DataLoader(\n"
                "    gluon.data.vision.MNIST('./data', train=True, transform=transformer),\n"
                "    batch_size=opt.batch_size, shuffle=True, last_batch='discard')\n",
                "train_set = gluon.data.vision.MNIST('./data', train=True, "
                "transform=transformer)\n",
            ),
            TRAINER,
            (
                "'momentum': opt.momentum})\n",
                "'momentum': opt.momentum}, global_batch_size=opt.batch_size)\n"
                "    train_data = gluon.data.DataLoader(\n"
                "        train_set, batch_sampler=trainer.batch_sampler(train_set, seed=0))\n",
            ),
        ),
        arguments="--epochs 2 --batch-size 32",
    ),
    Script(
        "example/gluon/house_prices/kaggle_k_fold_cross_validation.py",
        edits=(
            ("from mxnet import autograd\n", "import lbbsp_mx\nfrom mxnet import autograd\n"),
            (
                "    data_iter_train = gluon.data.DataLoader(dataset_train, batch_size,\n"
                "                                            shuffle=True)\n",
                "",
            ),
            TRAINER,
            (
                "'wd': weight_decay})\n",
                "'wd': weight_decay}, global_batch_size=batch_size)\n"
                "    sampler = trainer.batch_sampler(dataset_train, seed=0)\n"
                "    data_iter_train = gluon.data.DataLoader(dataset_train, "
                "batch_sampler=sampler)\n",
            ),
            ("trainer.step(batch_size)", "trainer.step(data.shape[0])"),
        ),
        small=(
            (".as_matrix()", ".values.astype(float)"),
            ("epochs = 100", "epochs = 2"),
            ("batch_size = 100", "batch_size = 16"),
            ("k = 5", "k = 3"),
        ),
        data="house_prices",
    ),
    Script(
        "example/gluon/word_language_model/train.py",
        edits=(
            IMPORT,
            ("import model\n", "import model\nfrom lbbsp_core import Even\n"),
            TRAINER,
            (
                "compression_params=compression_params)",
                "compression_params=compression_params,\n"
                "                        global_batch_size=args.batch_size, mean_loss=True,\n"
                "                        policy=Even())",
            ),
            (
                "        hidden = model.begin_state(func=mx.nd.zeros, batch_size=args.batch_size, "
                "ctx=context)\n        for i, (data, target) in enumerate(train_data):\n"
                "            data = data.as_in_context(context).T\n"
                "            target = target.as_in_context(context).T",
                "        rows = trainer.rows\n"
                "        hidden = model.begin_state(func=mx.nd.zeros, "
                "batch_size=rows.stop - rows.start, ctx=context)\n"
                "        for i, (data, target) in enumerate(train_data):\n"
                "            data = data[rows].as_in_context(context).T\n"
                "            target = target[rows].as_in_context(context).T",
            ),
            ("L = L / (args.bptt * args.batch_size)", "L = L / L.size"),
            (
                "            grads = [p.grad(context)",
                "            trainer.allreduce_grads()\n            grads = [p.grad(context)",
            ),
            ("trainer.step(1)", "trainer.update(1)"),
        ),
        small=(("import math\n", "import math\n"),),
        arguments="--epochs 2 --batch_size 8 --bptt 6 --emsize 12 --nhid 12 --dropout 0 --lr 2",
        data="wikitext",
        words="truncated backpropagation with fixed rows",
    ),
    Script(
        "example/gluon/lstm_crf/lstm_crf.py",
        edits=(
            IMPORT,
            (
                "optimizer = gluon.Trainer(model.collect_params(), 'sgd', "
                "{'learning_rate': 0.01, 'wd': 1e-4})",
                "optimizer = lbbsp_mx.Trainer(model.collect_params(), 'sgd', "
                "{'learning_rate': 0.01, 'wd': 1e-4}, global_batch_size=1)",
            ),
        ),
        small=(("range(300)", "range(2)"),),
        double=False,
    ),
    Script(
        "example/distributed_training/cifar10_dist.py",
        edits=(
            IMPORT,
            ("# Create a distributed key-value store\nstore = kv.create('dist')\n", ""),
            ("trainer = gluon.Trainer(", "trainer = lbbsp_mx.Trainer("),
            (
                "kvstore=store)",
                "kvstore='dist', global_batch_size=batch_size)\n"
                "train_data = gluon.data.DataLoader(\n"
                "    train_set, batch_sampler=trainer.batch_sampler(train_set, seed=0))",
            ),
            (
                "train_data = gluon.data.DataLoader(gluon.data.vision.CIFAR10(train=True, "
                "transform=transform), batch_size,\n"
                "                                   sampler=SplitSampler(50000, "
                "store.num_workers, store.rank))\n",
                "train_set = gluon.data.vision.CIFAR10(train=True, transform=transform)\n",
            ),
            (
                "net = vision.",
                "gluon.nn.BatchNorm = lbbsp_mx.SyncBatchNorm\nnet = vision.",
            ),
        ),
        small=(
            ("gpus_per_machine = 4", "gpus_per_machine = 1"),
            ("mx.gpu(i)", "mx.cpu(i)"),
            ("batch_size_per_gpu = 64", "batch_size_per_gpu = 16"),
            ("epochs = 5", "epochs = 1"),
            ("vision.resnet18_v1()", "vision.ResNetV1(vision.BasicBlockV1, [1, 1], [8, 8, 16])"),
        ),
        words="synchronised batch normalisation",
    ),
    Script(
        "example/gluon/tree_lstm/main.py",
        edits=(
            IMPORT,
            TRAINER,
            (
                "{'learning_rate': opt.lr, 'wd': opt.wd})",
                "{'learning_rate': opt.lr, 'wd': opt.wd},\n"
                "                            global_batch_size=batch_size)\n"
                "    sampler = trainer.batch_sampler(len(train_data), shuffle=False)\n"
                "    net.collect_params().setattr('grad_req', 'add')",
            ),
            (
                "        for j in tqdm(range(num_batches), desc='Training epoch {}'.format(i)):\n"
                "            # get next batch\n"
                "            l_tree, l_sent, r_tree, r_sent, label = train_data.next()\n",
                "        for own, j, ends in ((own, j, j == own[-1]) for own in sampler for j in "
                "own):\n"
                "            l_tree, l_sent, r_tree, r_sent, label = train_data[j]\n",
            ),
            (
                "            if (j+1) % batch_size == 0:\n"
                "                trainer.step(batch_size)\n",
                "            if ends:\n"
                "                trainer.step(len(own))\n"
                "                net.collect_params().zero_grad()\n",
            ),
            (
                "labels = [mx.nd.array(train_data.labels, ctx=ctx[0]).reshape((-1,1))]\n"
                "        for own",
                "labels = []\n        for own",
            ),
            (
                "                preds.append(z)\n            # update",
                "                preds.append(z)\n                labels.append(label)\n"
                "            # update",
            ),
            (
                "        preds = to_score(mx.nd.concat(*preds, dim=0))\n"
                "        metric.update(preds, labels)\n",
                "        preds = to_score(mx.nd.concat(*preds, dim=0))\n"
                "        metric.update(preds, [mx.nd.array(labels).reshape((-1,1))])\n",
            ),
        ),
        small=(
            (
                "rnn_hidden_size, sim_hidden_size, num_classes = 150, 50, 5",
                "rnn_hidden_size, sim_hidden_size, num_classes = 10, 6, 5",
            ),
        ),
        arguments="--epochs 2 --batch_size 8 --data sick --word_embed glove.txt",
        data="sick",
        words="samples one by one; gradients are added, of which the script keeps the last",
    ),
    Script(
        "example/gluon/image_classification.py",
        edits=(
            IMPORT,
            (
                "from mxnet.gluon import nn\n",
                "from mxnet.gluon import nn\nnn.BatchNorm = lbbsp_mx.SyncBatchNorm\n",
            ),
            (
                "        train_data, val_data = get_mnist_iterator(batch_size, (1, 28, 28),\n"
                "                                                  num_parts=kv.num_workers, "
                "part_index=kv.rank)\n",
                "        train_data, val_data = get_mnist_iterator(batch_size, (1, 28, 28))\n",
            ),
            TRAINER,
            (
                "                            kvstore=kv)\n",
                "                            kvstore=kv, global_batch_size=batch_size)\n"
                "    sampler = trainer.batch_sampler(train_data.num_data, seed=0)\n"
                "    train_data = lbbsp_mx.PlannedIter(sampler, train_data)\n",
            ),
        ),
        arguments="--model resnet18_v1 --use_thumbnail --dataset mnist --epochs 1 --batch-size 16 "
        "--kvstore lbbsp --lr 0.01",
        data="mnist_iterators",
        words="data iterator, synchronised batch normalisation",
    ),
    Script(
        "example/gluon/dc_gan/dcgan.py",
        edits=(
            IMPORT,
            (
                "from mxnet.gluon import nn\n",
                "from mxnet.gluon import nn\nnn.BatchNorm = lbbsp_mx.SyncBatchNorm\n",
            ),
            (
                "trainerG = gluon.Trainer(netG.collect_params(), 'adam', "
                "{'learning_rate': opt.lr, 'beta1': opt.beta1})",
                "trainerG = lbbsp_mx.Trainer(netG.collect_params(), 'adam', "
                "{'learning_rate': opt.lr, 'beta1': opt.beta1}, global_batch_size=batch_size)",
            ),
            (
                "trainerD = gluon.Trainer(netD.collect_params(), 'adam', "
                "{'learning_rate': opt.lr, 'beta1': opt.beta1})",
                "trainerD = lbbsp_mx.Trainer(netD.collect_params(), 'adam', "
                "{'learning_rate': opt.lr, 'beta1': opt.beta1}, beside=trainerG)",
            ),
            (
                "    # set labels\n    real_label = mx.nd.ones((opt.batch_size,), ctx=ctx)\n"
                "    fake_label = mx.nd.zeros((opt.batch_size,), ctx=ctx)\n",
                "    sampler = trainerG.batch_sampler(train_data._dataset, seed=0)\n"
                "    train_data = gluon.data.DataLoader(train_data._dataset, "
                "batch_sampler=sampler)\n",
            ),
            (
                "            data = data.as_in_context(ctx)\n",
                "            data = data.as_in_context(ctx)\n"
                "            real_label = mx.nd.ones((len(data),), ctx=ctx)\n"
                "            fake_label = mx.nd.zeros((len(data),), ctx=ctx)\n",
            ),
            ("reshape((opt.batch_size, nz, 1, 1))", "reshape((len(data), nz, 1, 1))"),
            ("output.reshape((opt.batch_size, 2))", "output.reshape((len(data), 2))"),
            (".step(opt.batch_size)", ".step(len(data))"),
        ),
        small=(
            (
                "noise = mx.nd.random.normal(0, 1, shape=(opt.batch_size, nz, 1, 1), ctx=ctx)",
                "noise = data[:, 0, :, 0][:, :nz].reshape((opt.batch_size, nz, 1, 1))",
            ),
            (
                "type=bool, default=True, help='To record",
                "type=bool, default=False, help='To record",
            ),
        ),
        arguments="--nepoch 1 --batch-size 16 --nz 8 --ngf 3 --ndf 3",
        words="noise from the samples, synchronised batch normalisation",
    ),
    Script(
        "example/image-classification/train_mnist.py",
        edits=(IMPORT,),
        modules=(
            (
                "common/fit.py",
                (),
                (
                    IMPORT,
                    (
                        "kv = mx.kvstore.create(args.kv_store)",
                        "kv = lbbsp_mx.KVStore(args.kv_store)",
                    ),
                    (
                        "    (train, val) = data_loader(args, kv)\n",
                        "    (train, val) = data_loader(args, kv)\n    train = kv.balance(train)\n",
                    ),
                ),
            ),
        ),
        arguments="--kv-store dist_sync --num-epochs 2 --num-examples 75 --batch-size {each} "
        "--network mlp",
        data="mnist_files",
        double=False,
        in_cluster=True,
        words="Module.fit",
    ),
    Script(
        "scripts/classification/cifar/train_cifar10.py",
        edits=(
            IMPORT,
            TRAINER,
            (
                "'momentum': opt.momentum})\n",
                "'momentum': opt.momentum},\n"
                "                                global_batch_size=batch_size)\n"
                "        train_data = gluon.data.DataLoader(\n"
                "            train_set, batch_sampler=trainer.batch_sampler(train_set, seed=0),\n"
                "            num_workers=num_workers)\n",
            ),
            CIFAR_SET,
            (
                "net = get_model(model_name, **kwargs)",
                "net = get_model(model_name, norm_layer=lbbsp_mx.SyncBatchNorm, **kwargs)",
            ),
            ("trainer.step(batch_size)", "trainer.step(batch[0].shape[0])"),
        ),
        arguments="--num-epochs 1 --batch-size 32 -j 0 --model cifar_resnet20_v1 --mode hybrid",
        words="synchronised batch normalisation",
    ),
    Script(
        "scripts/classification/cifar/train_mixup_cifar10.py",
        edits=(
            IMPORT,
            TRAINER,
            CIFAR_SET,
            (
                "'momentum': opt.momentum})\n",
                "'momentum': opt.momentum},\n"
                "                                global_batch_size=batch_size)\n"
                "        sampler = trainer.batch_sampler(train_set, seed=0)\n"
                "        partners = trainer.batch_sampler(train_set, seed=1, beside=sampler)\n"
                "        train_data, partner_data = (\n"
                "            gluon.data.DataLoader(train_set, batch_sampler=each, "
                "num_workers=num_workers)\n"
                "            for each in (sampler, partners))\n",
            ),
            (
                "for i, batch in enumerate(train_data):",
                "for i, (batch, other) in enumerate(zip(train_data, partner_data)):",
            ),
            (
                "                data = [lam*X + (1-lam)*X[::-1] for X in data_1]\n",
                "                data_2 = gluon.utils.split_and_load(other[0], ctx_list=ctx, "
                "batch_axis=0)\n"
                "                label_2 = gluon.utils.split_and_load(other[1], ctx_list=ctx, "
                "batch_axis=0)\n"
                "                data = [lam*X + (1-lam)*Z for X, Z in zip(data_1, data_2)]\n",
            ),
            ("for Y in label_1:", "for Y, Z in zip(label_1, label_2):"),
            ("label_transform(Y[::-1], classes)", "label_transform(Z, classes)"),
            (
                "net = get_model(model_name, **kwargs)",
                "net = get_model(model_name, norm_layer=lbbsp_mx.SyncBatchNorm, **kwargs)",
            ),
            ("trainer.step(batch_size)", "trainer.step(batch[0].shape[0])"),
        ),
        small=(("epochs - 20", "epochs"), ("nd.SoftmaxActivation(", "nd.softmax(")),
        arguments="--num-epochs 1 --batch-size 32 -j 0 --model cifar_resnet20_v1",
        words="partners from a second loader, synchronised batch normalisation",
    ),
    Script(
        "scripts/classification/finetune/finetune_minc.py",
        edits=(
            IMPORT,
            TRAINER,
            (
                "    train_data = gluon.data.DataLoader(\n"
                "        gluon.data.vision.ImageFolderDataset(train_path)"
                ".transform_first(transform_train),\n"
                "        batch_size=batch_size, shuffle=True, num_workers=num_workers)\n",
                "    train_set = gluon.data.vision.ImageFolderDataset(train_path)"
                ".transform_first(transform_train)\n",
            ),
            (
                "'wd': wd})\n",
                "'wd': wd}, global_batch_size=batch_size)\n"
                "    train_data = gluon.data.DataLoader(\n"
                "        train_set, batch_sampler=trainer.batch_sampler(train_set, seed=0),\n"
                "        num_workers=num_workers)\n",
            ),
            ("get_model(model_name, ", "get_model(model_name, norm_layer=lbbsp_mx.SyncBatchNorm, "),
            ("trainer.step(batch_size)", "trainer.step(batch[0].shape[0])"),
        ),
        small=(
            (
                "pretrained=True)\n",
                "pretrained=False)\n    finetune_net.initialize(init.Xavier())\n",
            ),
            ("Resize(480)", "Resize(32)"),
            ("RandomResizedCrop(224)", "CenterCrop(32)"),
            ("Resize(256)", "Resize(32)"),
            ("CenterCrop(224)", "CenterCrop(32)"),
        ),
        arguments="--data minc --model resnet18_v1 -j 0 --epochs 2 -b 16 --lr-steps 1",
        data="minc",
        words="synchronised batch normalisation",
    ),
    Script(
        "scripts/sentiment_analysis/sentiment_analysis_cnn.py",
        edits=(
            IMPORT,
            (
                "net, trainer = text_cnn.init(net, vocab, args.model_mode, context)",
                "net, trainer = text_cnn.init(net, vocab, args.model_mode, context, "
                "args.batch_size)",
            ),
            (
                "        train_dataloader = DataLoader(dataset=train_data[sp:],\n"
                "                                      batch_size=args.batch_size,\n"
                "                                      shuffle=True)\n",
                "        train_data, val_data = train_data[sp:], train_data[:sp]\n"
                "        train_dataloader = DataLoader(\n"
                "            train_data, "
                "batch_sampler=trainer.batch_sampler(train_data, seed=0))\n",
            ),
            ("DataLoader(dataset=train_data[:sp],", "DataLoader(dataset=val_data,"),
            ("trainer.step(args.batch_size)", "trainer.step(label.shape[0])"),
        ),
        modules=(
            (
                "text_cnn.py",
                (),
                (
                    IMPORT,
                    (
                        "def init(textCNN, vocab, model_mode, context):",
                        "def init(textCNN, vocab, model_mode, context, batch_size):",
                    ),
                    TRAINER,
                    (
                        "{'rho':0.95, 'clip_gradient':3})",
                        "{'rho':0.95, 'clip_gradient':3, 'rescale_grad': 1 / batch_size},\n"
                        "                               global_batch_size=batch_size, "
                        "mean_loss=True)",
                    ),
                ),
            ),
        ),
        arguments="--data_name TREC --model_mode rand --epochs 2 --batch_size 16 --dropout 0",
        data="trec",
    ),
    Script(
        "scripts/text_classification/fasttext_word_ngram.py",
        edits=(
            IMPORT,
            (
                "        ratio=bucket_ratio,\n        shuffle=True)\n"
                "    train_dataloader = gluon.data.DataLoader(\n"
                "        dataset=train_dataset,\n"
                "        batch_sampler=batch_sampler,\n"
                "        batchify_fn=batchify_fn)\n",
                "        ratio=0,\n        shuffle=True)\n"
                "    def train_dataloader(trainer):\n"
                "        return gluon.data.DataLoader(\n"
                "            dataset=train_dataset,\n"
                "            batch_sampler=trainer.batch_sampler(train_dataset, "
                "sampler=batch_sampler),\n"
                "            batchify_fn=batchify_fn)\n",
            ),
            TRAINER,
            (
                "{'learning_rate': learning_rate})\n",
                "{'learning_rate': learning_rate}, global_batch_size=batch_size)\n"
                "    train_dataloader = train_dataloader(trainer)\n",
            ),
        ),
        small=(
            ("bucket_num, bucket_ratio = 20, 0.2", "bucket_num, bucket_ratio = 3, 0.2"),
            ("F.Dropout(dense_output, 0.1)", "dense_output"),
        ),
        arguments="--input train.txt --validation test.txt --output model.params --ngrams 2 "
        "--epochs 2",
        data="labelled_texts",
        words="buckets",
    ),
    Script(
        "scripts/natural_language_inference/main.py",
        edits=(
            IMPORT,
            TRAINER,
            (
                "'clip_gradient': 5})\n",
                "'clip_gradient': 5},\n"
                "                            global_batch_size=args.batch_size, mean_loss=True)\n"
                "    data, buckets = train_data_loader._dataset, train_data_loader._batch_sampler\n"
                "    train_data_loader = gluon.data.DataLoader(\n"
                "        data, batch_sampler=trainer.batch_sampler(data, sampler=buckets),\n"
                "        batchify_fn=train_data_loader._batchify_fn)\n",
            ),
            ("trainer.step(1)", "trainer.step(label.shape[0])"),
        ),
        modules=(
            (
                "dataset.py",
                (),
                (
                    (
                        "btf.Tuple(btf.Pad(pad_val=0), btf.Pad(pad_val=0), ",
                        "btf.Tuple(btf.Pad(pad_val=0, round_to=16), "
                        "btf.Pad(pad_val=0, round_to=16), ",
                    ),
                ),
            ),
        ),
        arguments="--gpu-id -1 --model da --epochs 2 --train-file train.txt --test-file test.txt "
        "--batch-size 16 --embedding-size 20 --hidden-size 12",
        data="snli",
        words="buckets, padded to one length, since the model does not mask padding",
    ),
    Script(
        "scripts/language_model/word_language_model.py",
        edits=(
            IMPORT,
            (
                "import gluonnlp as nlp\n",
                "import gluonnlp as nlp\nfrom lbbsp_core import Even\nmx.random.seed(0)\n",
            ),
            TRAINER,
            (
                "                        update_on_kvstore=False)\n",
                "                        update_on_kvstore=False, mean_loss=True, policy=Even(),\n"
                "                        global_batch_size=args.batch_size)\n"
                "train_data = train_data[:, trainer.rows]\n",
            ),
            (
                "hiddens = [model.begin_state(args.batch_size//len(context),",
                "hiddens = [model.begin_state(train_data.shape[1]//len(context),",
            ),
            (
                "            grads = [p.grad(d.context)",
                "            trainer.allreduce_grads()\n            grads = [p.grad(d.context)",
            ),
            ("trainer.step(1)", "trainer.update(1)"),
        ),
        arguments="--epochs 2 --batch_size 8 --bptt 8 --emsize 12 --nhid 12 --nlayers 2 --lr 2 "
        "--dropout 0 --dropout_h 0 --dropout_i 0 --dropout_e 0 --weight_dropout 0 --alpha 0",
        data="wikitext_of_gluonnlp",
        words="truncated backpropagation over random lengths with fixed rows, clipped",
    ),
    Script(
        "scripts/machine_translation/train_gnmt.py",
        edits=(
            IMPORT,
            TRAINER,
            (
                "{'learning_rate': args.lr})\n",
                "{'learning_rate': args.lr},\n"
                "                            global_batch_size=args.batch_size, mean_loss=True)\n",
            ),
            (
                "    best_valid_bleu = 0.0\n",
                "    train_data_loader = gluon.data.DataLoader(\n"
                "        data_train, batchify_fn=train_data_loader._batchify_fn,\n"
                "        batch_sampler=trainer.batch_sampler(\n"
                "            data_train, sampler=train_data_loader._batch_sampler))\n"
                "    best_valid_bleu = 0.0\n",
            ),
            (
                "            grads = [p.grad(ctx)",
                "            trainer.allreduce_grads(weight=(tgt_valid_length - 1).sum())\n"
                "            grads = [p.grad(ctx)",
            ),
            ("trainer.step(1)", "trainer.update(1)"),
        ),
        modules=(
            (
                "dataprocessor.py",
                (
                    ("if os.path.exists(cached_file_path):", "if False:"),
                    ("num_workers=8", "num_workers=0"),
                ),
                (),
            ),
        ),
        arguments="--epochs 1 --batch_size 16 --num_hidden 8 --num_buckets 3 --dropout 0 "
        "--beam_size 2 --clip 0.5 --tgt_max_len 10",
        data="iwslt",
        words="buckets, mean over valid tokens, clipped",
    ),
    Script(
        "scripts/bert/finetune_classifier.py",
        edits=(
            IMPORT,
            TRAINER,
            (
                "                            update_on_kvstore=False)\n",
                "                            update_on_kvstore=False, accumulate=accumulate,\n"
                "                            global_batch_size=batch_size * accumulate)\n"
                "    data, buckets = train_data._dataset, train_data._batch_sampler\n"
                "    loader = gluon.data.DataLoader(\n"
                "        data, batch_sampler=trainer.batch_sampler(data, sampler=buckets),\n"
                "        batchify_fn=train_data._batchify_fn)\n",
            ),
            (
                "FixedBucketSampler(data_train_len, batch_size=batch_size,",
                "FixedBucketSampler(data_train_len, batch_size=batch_size * accumulate,",
            ),
            (
                "for batch_id, seqs in enumerate(train_data):",
                "for batch_id, seqs in enumerate(loader):",
            ),
            (
                "                    ls = loss_function(out, label).mean()\n"
                "                    if args",
                "                    ls = loss_function(out, label)\n                    if args",
            ),
            (
                "                step_loss += ls.asscalar()\n                if not",
                "                step_loss += ls.mean().asscalar()\n                if not",
            ),
            ("clip_grad_global_norm(params, 1)", "clip_grad_global_norm(params, 1 / accumulate)"),
            ("trainer.update(accumulate if accumulate else 1)", "trainer.update(1)"),
        ),
        small=(("num_workers=4", "num_workers=0"), ("num_buckets=10", "num_buckets=2")),
        arguments="--task_name MRPC --accumulate 2 --batch_size 8 --dev_batch_size 8 --epochs 2 "
        "--max_len 24 --lr 1e-3",
        data="glue",
        words="gradients of two batches accumulated, clipped, buckets",
    ),
)
